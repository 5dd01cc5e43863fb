"""Workers and nodes that fail, go and come, as processes: the job goes on, and says what happened."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

NAMES = "RANK WORLD_SIZE GROUP_RANK DISTTRAIN_ROUND TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
TELLING = f"""
    import os, sys, time
    print("in", *[os.environ[name] for name in {NAMES.split()}], os.getpid(), flush=True)
    until_s = time.monotonic() + 300
    while not os.path.exists("finish") and time.monotonic() < until_s:
        time.sleep(0.05)
"""


def start(launches: Launches, port: int, nodes: str, *argv: str) -> subprocess.Popen[str]:
    conf = "last_call_timeout=2,keep_alive_interval=0.2,keep_alive_max_attempt=30,join_timeout=60"
    meeting = ("--nnodes", nodes, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf)
    return launches.start(*meeting, *argv)


def told(launches: Launches, process: subprocess.Popen[str]) -> list[int]:
    """The numbers of NAMES and the pid, from the next worker that starts."""
    (line,) = launches.ready(process, 1)
    match = re.fullmatch(r"\[rank \d+\] in ([\d ]+)\n", line)
    assert match, line
    return [int(number) for number in match[1].split()]


def test_a_failed_worker_is_started_again(launches: Launches) -> None:
    script = launches.script("""
        import os
        from disttrain.store import PrefixStore, TCPStore
        attempt, round_number = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["DISTTRAIN_ROUND"]
        host, port = os.environ["DISTTRAIN_STORE"].partition(",")[0].rsplit(":", 1)
        store = PrefixStore(round_number, TCPStore(host, int(port), timeout=240))
        store.barrier("before", 2)
        if attempt == "0" and os.environ["RANK"] == "1":
            os._exit(3)
        store.barrier("after", 2)
        print("attempt", attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], round_number)
    """)
    ended = launches.run("--nproc-per-node", "2", "--max-restarts", "2", script)
    assert (ended.exit_code, sorted(ended.lines)) == (0, ["[rank 0] attempt 1 2 1", "[rank 1] attempt 1 2 1"])
    assert "rank 1 failed first: exit code 3" in ended.stderr
    assert "disttrain-launch: round 1 begins: 1 node, 2 workers; restart 1 of 2" in ended.stderr.splitlines()


def test_when_restarts_are_used_up_the_first_cause_is_named(launches: Launches) -> None:
    script = launches.script("""
        import os, sys
        if os.environ["RANK"] == "1":
            raise SystemExit(f"no luck in round {os.environ['DISTTRAIN_ROUND']}")
    """)
    ended = launches.run("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert ended.exit_code == 1
    assert [line for line in ended.stderr.splitlines() if line.startswith("[rank 1]")] == [
        "[rank 1] no luck in round 0",
        "[rank 1] no luck in round 1",
    ]
    *_, cause, note = ended.stderr.splitlines()
    assert cause.startswith("disttrain-launch: rank 1 failed first: exit code 1 after ")
    assert note == "    The job had been started 2 times."


def test_who_fails_at_once_each_time_is_not_started_for_ever(launches: Launches) -> None:
    ended = launches.run("--max-restarts", "100", launches.script("raise SystemExit(7)"))
    assert ended.exit_code == 7
    note = "    Rank 0 ended so 3 times in a row (exit code 7), each time within 10 s: starting it again does not help."
    assert ended.stderr.splitlines()[-1].startswith(note)


def test_success_here_and_failure_there_is_failure(launches: Launches, port: int) -> None:
    script = launches.script("""
        import os, sys, time
        time.sleep(0.5 if os.environ["RANK"] == "1" else 0)
        sys.exit(5 if os.environ["RANK"] == "1" else 0)
    """)
    nodes = [start(launches, port, "2", "--node-rank", str(rank), script) for rank in (0, 1)]
    ended = [launches.end(node) for node in nodes]
    assert [node.exit_code for node in ended] == [5, 5]
    assert "rank 1 failed first: exit code 5" in ended[0].stderr


def test_nodes_without_numbers_find_their_places(launches: Launches, port: int) -> None:
    script = launches.script(f"import os; print(*[os.environ[name] for name in {NAMES.split()[:3]}])")
    nodes = [start(launches, port, "2", "--nproc-per-node", str(workers), script) for workers in (1, 2)]
    ended = [launches.end(node) for node in nodes]
    assert [node.exit_code for node in ended] == [0, 0], ended[0].stderr
    lines = sorted(line for node in ended for line in node.lines)
    assert [line.split()[:4] for line in lines] == [["[rank", f"{rank}]", str(rank), "3"] for rank in range(3)]
    assert {len(node.lines) for node in ended} == {1, 2}


def test_a_node_that_is_gone_is_done_without_and_comes_back(launches: Launches, port: int) -> None:
    script = launches.script(TELLING)
    nodes = [start(launches, port, "1:3", "--node-rank", str(rank), script) for rank in range(3)]
    assert [told(launches, node)[:6] for node in nodes] == [[rank, 3, rank, 0, 0, 0] for rank in range(3)]
    nodes[1].kill()
    killed_s = time.monotonic()
    assert told(launches, nodes[0])[:4] == [0, 2, 0, 1]
    assert told(launches, nodes[2])[:4] == [1, 2, 1, 1]
    assert time.monotonic() - killed_s < 60.0
    back = start(launches, port, "1:3", "--node-rank", "1", script)
    places = [told(launches, node) for node in (nodes[0], nodes[2], back)]
    assert [place[:5] for place in places] == [[0, 3, 0, 2, 0], [1, 3, 1, 2, 0], [2, 3, 2, 2, 0]]
    (launches.folder / "finish").touch()
    ended = [launches.end(node) for node in (nodes[0], nodes[2], back)]
    assert [node.exit_code for node in ended] == [0, 0, 0]
    assert "round 0 ended: node 1 (" in ended[0].stderr
    assert "gave no sign of life for 6 s." in ended[0].stderr
    assert "round 1 ended: 1 more node came." in ended[0].stderr


def test_a_node_that_is_told_to_stop_leaves_and_the_others_go_on(launches: Launches, port: int) -> None:
    script = launches.script(TELLING)
    nodes = [start(launches, port, "1:2", "--node-rank", str(rank), script) for rank in range(2)]
    for node in nodes:
        told(launches, node)
    nodes[1].send_signal(signal.SIGTERM)
    left = launches.end(nodes[1])
    assert left.exit_code == 128 + signal.SIGTERM
    assert told(launches, nodes[0])[:4] == [0, 1, 0, 1]
    (launches.folder / "finish").touch()
    ended = launches.end(nodes[0])
    assert ended.exit_code == 0
    assert "leaves (SIGTERM)." in ended.stderr


def test_a_spare_waits_and_takes_the_place_of_a_lost_node(launches: Launches, port: int) -> None:
    script = launches.script(TELLING)
    nodes = [start(launches, port, "2", "--max-restarts", "1", script) for _ in range(2)]
    for node in nodes:
        told(launches, node)
    spare = start(launches, port, "2", "--max-restarts", "1", script)
    assert spare.stderr is not None
    assert spare.stderr.readline() == "disttrain-launch: waiting for the next round; one is running\n"
    first = next(node for node in nodes if _holds(node, port))
    other = next(node for node in nodes if node is not first)
    other.kill()
    assert told(launches, first)[1:5] == [2, 0, 1, 0]
    assert told(launches, spare)[1:5] == [2, 1, 1, 0]
    (launches.folder / "finish").touch()
    assert [launches.end(node).exit_code for node in (first, spare)] == [0, 0]


def _holds(launcher: subprocess.Popen[str], port: int) -> bool:
    servers = [
        child for child in psutil.Process(launcher.pid).children() if "disttrain.store.server" in child.cmdline()
    ]
    return any(connection.laddr.port == port for server in servers for connection in server.net_connections())


def test_another_script_on_another_node_is_refused_unless_it_is_meant(launches: Launches, port: int) -> None:
    launches.script("", "one.py")
    launches.script("", "two.py")
    for flags, exit_code in (((), 2), (("--allow-different-commands",), 0)):
        nodes = [
            start(launches, port, "2", "--node-rank", str(rank), *flags, f"{name}.py")
            for rank, name in ((0, "one"), (1, "two"))
        ]
        ended = [launches.end(node) for node in nodes]
        assert [node.exit_code for node in ended] == [exit_code] * 2
        refused = ["runs another script or other arguments than node 0 (" in node.stderr for node in ended]
        assert refused == [not flags] * 2
