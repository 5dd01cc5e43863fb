"""Two nodes on loopback: they meet, agree or refuse alike, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from disttrain.store import Certificates
from tests.surroundings.authority import Authority

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

WAITING = """
    import os, time
    print("ready", os.getpid())
    time.sleep(100)
"""


def start(launches: Launches, port: int, node_rank: int, *argv: str, num_nodes: int = 2) -> subprocess.Popen[str]:
    node = ["--nnodes", str(num_nodes), "--node-rank", str(node_rank), "--master-port", str(port)]
    return launches.start(*node, *argv)


def test_two_nodes_are_one_job(launches: Launches, port: int) -> None:
    script = launches.script("""
        import os
        from disttrain.store import TCPStore
        names = ["GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]
        host, port = os.environ["DISTTRAIN_STORE"].rsplit(":", 1)
        store = TCPStore(host, int(port), timeout=120)
        store.set("port of torch", os.environ["MASTER_PORT"])
        store.barrier("all here", 4)
        assert store.get("port of torch").decode() == os.environ["MASTER_PORT"]
        store.close()
        print(*[os.environ[name] for name in names])
    """)
    launches.run("--new-token", "token")
    nodes = [start(launches, port, rank, "--nproc-per-node", "2", "--token-file", "token", script) for rank in (1, 0)]
    second, first = [launches.end(node) for node in nodes]
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert sorted(first.lines) == ["[rank 0] 0 0 0 4 2 2", "[rank 1] 0 1 1 4 2 2"]
    assert sorted(second.lines) == ["[rank 2] 1 2 0 4 2 2", "[rank 3] 1 3 1 4 2 2"]


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("flags", [[], ["--no-store-proxy"]], ids=["proxy", "direct"])
def test_the_store_has_a_connection_of_a_node_and_not_of_its_ranks(
    launches: Launches, port: int, authority: Authority, flags: list[str], is_secured: bool
) -> None:
    script = launches.script(f"""
        import os, psutil
        from disttrain.store import TCPStore
        host, port = os.environ["DISTTRAIN_STORE"].rsplit(":", 1)
        store = TCPStore(host, int(port), timeout=120)
        listener = store.listener()
        listener.barrier("all here", 6)
        ends = psutil.net_connections("tcp")
        used = sum(end.laddr.port == {port} and end.status == "ESTABLISHED" for end in ends)
        store.barrier("counted", 6)
        print(port == "{port}", used)
        store.barrier("said", 6)
        listener.close()
        store.close()
    """)
    launches.run("--new-token", "token")
    argv = ["--nproc-per-node", "3", "--token-file", "token", *flags, script]
    served = tls(authority.issue(), launches.folder, "CA", "CERT", "KEY") if is_secured else {}
    told = tls(authority.issue(), launches.folder, "CA") if is_secured else {}
    node = ["--nnodes", "2", "--master-port", str(port)]
    nodes = [launches.start(*node, "--node-rank", str(rank), *argv, **(told if rank else served)) for rank in range(2)]
    ended = [launches.end(node) for node in nodes]
    assert [node.exit_code for node in ended] == [0, 0], ended[0].stderr
    # Each launcher has one; besides it has each node's proxy, or two of each worker.
    said = "True 14" if flags else "False 4"
    assert [line.partition("] ")[2] for node in ended for line in node.lines] == [said] * 6


def tls(certificates: Certificates, folder: Path, *kinds: str) -> dict[str, str]:
    """The settings that name these files, by paths that hold in `folder` only."""
    files = {"CA": certificates.ca_file, "CERT": certificates.cert_file, "KEY": certificates.key_file}
    return {f"DISTTRAIN_STORE_TLS_{kind}": os.path.relpath(files[kind], folder) for kind in kinds}


def test_nodes_and_workers_meet_over_tls(launches: Launches, port: int, authority: Authority) -> None:
    script = launches.script("""
        import os
        from disttrain.store import TCPStore
        host, port = os.environ["DISTTRAIN_STORE"].rsplit(":", 1)
        os.chdir("/")
        store = TCPStore(host, int(port), timeout=120)
        store.barrier("all here", 2)
        print(type(store._channel._socket).__name__)
        store.close()
    """)
    launches.run("--new-token", "token")
    node = ["--nnodes", "2", "--master-port", str(port), "--token-file", "token"]
    served = tls(authority.issue(), launches.folder, "CA", "CERT", "KEY")
    first = launches.start(*node, "--node-rank", "0", script, **served)
    second = launches.start(*node, "--node-rank", "1", script, **tls(authority.issue(), launches.folder, "CA"))
    for rank, ended in enumerate((launches.end(first), launches.end(second))):
        assert (ended.exit_code, ended.lines) == (0, [f"[rank {rank}] TlsSocket"]), ended.stderr


def test_a_node_of_another_authority_is_told_why(
    launches: Launches, port: int, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    launches.run("--new-token", "token")
    script = launches.script(WAITING)
    node = ["--nnodes", "2", "--master-port", str(port), "--token-file", "token"]
    served = tls(authority.issue(), launches.folder, "CA", "CERT", "KEY")
    first = launches.start(*node, "--node-rank", "0", "--join-timeout", "20", script, **served)
    stranger = launches.run(*node, "--node-rank", "1", script, **tls(other.issue(), launches.folder, "CA"))
    assert stranger.exit_code == 2
    assert "the server's certificate is not one of the job's" in stranger.stderr
    assert "Every node needs the same --token-file, certificate authority" in stranger.stderr
    first.terminate()
    launches.end(first)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rdzv-id", "other"], "has --rdzv-id other, node 0"),
    ],
)
def test_nodes_that_differ_are_refused_alike(launches: Launches, port: int, argv: list[str], words: str) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, 0, script), start(launches, port, 1, *argv, script)]
    first, second = [launches.end(node) for node in nodes]
    assert (first.exit_code, second.exit_code) == (2, 2)
    assert first.stderr.splitlines()[-1] == second.stderr.splitlines()[-1]
    assert words in first.stderr
    assert (first.stdout, second.stdout) == ("", "")


def test_other_world_sizes_are_refused_alike(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, 0, script), start(launches, port, 1, script, num_nodes=3)]
    first, second = [launches.end(node) for node in nodes]
    assert "has --nnodes 3, node 0" in first.stderr
    assert first.stderr.splitlines()[-1] == second.stderr.splitlines()[-1]
    assert (first.exit_code, second.exit_code) == (2, 2)


def test_a_rank_given_twice_is_refused_alike(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, rank, script, num_nodes=3) for rank in (0, 1, 1)]
    ended = [launches.end(node) for node in nodes]
    assert [node.exit_code for node in ended] == [2, 2, 2]
    assert len({node.stderr.splitlines()[-1] for node in ended}) == 1
    assert "--node-rank 1 was given twice" in ended[0].stderr


def test_who_comes_after_the_start_disturbs_nobody(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, rank, script) for rank in (0, 1)]
    for node in nodes:
        launches.ready(node, 1)
    late = launches.end(start(launches, port, 1, script))
    assert late.exit_code == 2
    assert "the job began without this node: --node-rank 1 was not free." in late.stderr
    assert [node.poll() for node in nodes] == [None, None]
    nodes[0].send_signal(signal.SIGTERM)
    assert [launches.end(node).exit_code for node in nodes] == [143, 143]


def test_the_absent_are_named_while_waiting_and_at_the_end(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, rank, "--join-timeout", "5.7", script, num_nodes=4) for rank in (0, 2)]
    first, second = [launches.end(node) for node in nodes]
    assert (first.exit_code, second.exit_code) == (2, 2)
    assert "disttrain-launch: waiting for nodes 1, 3 of 4 (3 s so far)" in first.stderr.splitlines()
    assert second.stderr.startswith("disttrain-launch: waiting for node")
    refusal = "disttrain-launch: nodes 1, 3 did not come within 5.7 s; nodes 0, 2 did."
    assert first.stderr.splitlines()[-1] == second.stderr.splitlines()[-1]
    assert first.stderr.splitlines()[-1].startswith(refusal)


def test_a_master_that_is_not_there_is_named(launches: Launches, port: int) -> None:
    ended = launches.end(start(launches, port, 1, "--join-timeout", "1", launches.script(WAITING)))
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"disttrain-launch: node 0 was not reached at 127.0.0.1:{port} within 1 s: ")


def test_a_host_that_does_not_resolve_is_named(launches: Launches) -> None:
    launches.run("--new-token", "token")
    node = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "no-such-host.invalid", "--token-file", "token")
    ended = launches.run(*node, "--join-timeout", "1", launches.script(WAITING))
    assert ended.exit_code == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("disttrain-launch: node 0 was not reached at no-such-host.invalid:29500 within 1 s: ")
    assert "the host name does not resolve" in last


def test_a_wrong_token_is_refused_at_once(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    launches.run("--new-token", "right")
    launches.run("--new-token", "wrong")
    first = start(launches, port, 0, "--token-file", "right", script)
    second = launches.end(start(launches, port, 1, "--token-file", "wrong", script))
    assert second.exit_code == 2
    assert second.stderr == (
        f"disttrain-launch: node 0's store at 127.0.0.1:{port} and this node don't fit together: The client's token is "
        "not the server's. Every node needs the same --token-file, certificate authority and disttrain.\n"
    )
    first.send_signal(signal.SIGINT)
    assert launches.end(first).exit_code == 130


def test_a_failure_on_one_node_ends_both_with_its_code(launches: Launches, port: int) -> None:
    script = launches.script("""
        import os, time
        print("ready", os.getpid())
        if os.environ["RANK"] == "1":
            raise ValueError("on the other node")
        time.sleep(100)
    """)
    began_s = time.monotonic()
    nodes = [start(launches, port, rank, script) for rank in (0, 1)]
    ended = [launches.end(node) for node in nodes]
    assert time.monotonic() - began_s < 60.0
    assert [node.exit_code for node in ended] == [1, 1]
    report = ended[0].stderr[ended[0].stderr.index("disttrain-launch: the last lines") :]
    assert "    ValueError: on the other node\n" in report
    assert "rank 1 failed first: exit code 1" in report
    # Node 0 tells everything, the others one line.
    assert ended[1].stderr.splitlines()[-1] == report.splitlines()[-1]
    assert "[node 1, " in report.splitlines()[-1]
    assert "the last lines" not in ended[1].stderr


def test_a_killed_worker_ends_both_nodes_within_seconds(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, rank, "--nproc-per-node", "2", script) for rank in (0, 1)]
    lines = [launches.ready(node, 2) for node in nodes]
    os.kill(int(lines[0][0].split()[3]), signal.SIGKILL)
    killed_s = time.monotonic()
    ended = [launches.end(node) for node in nodes]
    assert time.monotonic() - killed_s < 40.0
    assert [node.exit_code for node in ended] == [137, 137]
    assert launches.living() == []


def test_a_killed_launcher_of_node_0_ends_the_other(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, rank, script) for rank in (0, 1)]
    for node in nodes:
        launches.ready(node, 1)
    nodes[0].kill()
    ended = launches.end(nodes[1], limit_s=80.0)
    assert ended.exit_code == 1
    assert "node 0's store at 127.0.0.1:" in ended.stderr


def test_a_killed_launcher_of_another_node_is_missed(launches: Launches, port: int) -> None:
    script = launches.script(WAITING)
    nodes = [start(launches, port, rank, script) for rank in (0, 1)]
    for node in nodes:
        launches.ready(node, 1)
    nodes[1].kill()
    ended = launches.end(nodes[0], limit_s=80.0)
    assert ended.exit_code == 1
    assert "gave no sign of life for 8 s; the job was stopped." in ended.stderr


def test_a_proxy_that_dies_fails_its_node_and_the_next_round_does_without(launches: Launches, port: int) -> None:
    script = launches.script(f"""
        import os
        from disttrain.store import TCPStore
        host, port = os.environ["DISTTRAIN_STORE"].rsplit(":", 1)
        store = TCPStore(host, int(port), timeout=60)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print("waiting", flush=True)
            store.wait(["never"])
        store.barrier("again", 4)
        print(port == "{port}")
        store.close()
    """)
    argv = ["--nproc-per-node", "2", "--max-restarts", "1", script]
    nodes = [start(launches, port, rank, *argv) for rank in range(2)]
    for node in nodes:
        launches.ready(node, 2)
    (proxy,) = [
        child for child in psutil.Process(nodes[1].pid).children() if "disttrain.store.server" in child.cmdline()
    ]
    proxy.kill()
    ended = [launches.end(node) for node in nodes]
    assert [node.exit_code for node in ended] == [0, 0], ended[1].stderr
    said = [[line.partition("] ")[2] for line in node.lines if "waiting" not in line] for node in ended]
    assert said == [["False"] * 2, ["True"] * 2]
