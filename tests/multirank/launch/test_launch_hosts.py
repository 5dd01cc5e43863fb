"""Three hosts with addresses of their own: they are killed, cut off and held up, and training goes on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from disttrain.testing import RankPool
from tests.cases import llama
from tests.forkserver.host import server_in_host
from tests.surroundings.launching import EXAMPLES, launcher_at
from tests.surroundings.network_hosts import OWN_FOLDER, Hosts, Weather, network_hosts

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer
    from tests.multirank.launch.conftest import Launches

NAMES = ("host-a", "host-b", "host-c")
NUM_WORKERS = 2
LOST = "node 0's store at host-a:29500 went away, and the job with it: it did not answer for "
LIMIT_S = 360.0
MEETING = """
    import os, time
    from disttrain.store import PrefixStore, TCPStore
    host, port = os.environ["DISTTRAIN_STORE"].partition(",")[0].rsplit(":", 1)
    store = PrefixStore(os.environ["DISTTRAIN_ROUND"], TCPStore(host, int(port), timeout=240))
    store.barrier("all here", int(os.environ["WORLD_SIZE"]))
    print("in", os.environ["DISTTRAIN_ROUND"], os.environ["WORLD_SIZE"], flush=True)
    until_s = time.monotonic() + 240
    while not os.path.exists("finish") and time.monotonic() < until_s:
        time.sleep(0.05)
"""
"""Each worker says `in ROUND WORLD_SIZE`, once all have met."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with network_hosts(tmp_path, *NAMES) as hosts:
        yield hosts


def launch(
    launches: Launches,
    hosts: Hosts,
    name: str,
    *argv: str,
    nodes: str = "2:3",
    beats: int = 24,
    num_workers: int = NUM_WORKERS,
    server: ForkServer | None = None,
) -> subprocess.Popen[str]:
    """The launcher of this host, which is started where it does not run; `python`: what workers are forked from."""
    if not (launches.folder / "token").exists():
        launches.run("--new-token", "token")
    host = hosts.running(name) or hosts.start(name)
    conf = f"last_call_timeout=1,keep_alive_interval=0.25,keep_alive_max_attempt={beats}"
    meeting = ("--nnodes", nodes, "--node-rank", str(NAMES.index(name)), "--rdzv-endpoint", f"{NAMES[0]}:29500")
    flags = ("--token-file", "token", "--rdzv-conf", conf, "--nproc-per-node", str(num_workers))
    address = None if server is None else server_in_host(server, host.pid)
    command = [*launcher_at(address), *meeting, *flags, *argv]
    environ = {**launches.environ(), "TMPDIR": OWN_FOLDER, "OMP_NUM_THREADS": "1"}  # all hosts have the same cores
    process = host.start(command, environ, launches.folder)
    launches.started.append(process)
    return process


def met(launches: Launches, process: subprocess.Popen[str]) -> set[tuple[int, int]]:
    """(round, world size) that this host's workers say when they have met next."""
    said = [line.split() for line in launches.ready(process, NUM_WORKERS)]
    return {(int(words[-2]), int(words[-1])) for words in said}


def heard(process: subprocess.Popen[str], words: str) -> str:
    """Read the launcher's stderr up to a line with these words, and return that."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return line
    raise AssertionError(f"it ended without {words!r}: {''.join(lines)}")


def test_slow_lossy_links_and_a_short_cut_are_ridden_out(launches: Launches, hosts: Hosts) -> None:
    script = launches.script(MEETING)
    hosts.switch.weather = Weather(delay_s=0.02, loss=0.02)
    nodes = [launch(launches, hosts, name, script, nodes="3", beats=32) for name in NAMES]
    assert [met(launches, node) for node in nodes] == [{(0, 6)}] * 3
    for name in NAMES:
        host = hosts.running(name)
        assert host is not None
        hosts.switch.cut_off(host)
        time.sleep(0.5)
        hosts.switch.mend(host)
    (launches.folder / "finish").touch()
    assert [launches.end(node).exit_code for node in nodes] == [0, 0, 0]


def test_a_host_that_is_cut_off_stops_while_the_others_go_on(launches: Launches, hosts: Hosts) -> None:
    script = launches.script(MEETING)
    nodes = [launch(launches, hosts, name, script) for name in NAMES]
    assert [met(launches, node) for node in nodes] == [{(0, 6)}] * 3
    host = hosts.running("host-b")
    assert host is not None
    hosts.switch.cut_off(host)
    cut_s = time.monotonic()
    assert [met(launches, node) for node in (nodes[0], nodes[2])] == [{(1, 4)}] * 2
    ended = launches.end(nodes[1])
    assert time.monotonic() - cut_s < 60.0
    assert ended.exit_code == 1
    assert LOST in ended.stderr
    hosts.switch.mend(host)
    back = launch(launches, hosts, "host-b", script)
    assert [met(launches, node) for node in (nodes[0], nodes[2], back)] == [{(2, 6)}] * 3
    (launches.folder / "finish").touch()
    assert [launches.end(node).exit_code for node in (nodes[0], nodes[2], back)] == [0, 0, 0]


def test_when_the_host_of_the_store_is_gone_a_job_without_standby_ends(launches: Launches, hosts: Hosts) -> None:
    script = launches.script(MEETING)
    nodes = [launch(launches, hosts, name, script, nodes="3", beats=8) for name in NAMES]
    assert [met(launches, node) for node in nodes] == [{(0, 6)}] * 3
    host = hosts.running("host-a")
    assert host is not None
    hosts.switch.cut_off(host)
    host.kill()
    killed_s = time.monotonic()
    ended = [launches.end(node) for node in nodes[1:]]
    assert time.monotonic() - killed_s < 40.0
    assert [node.exit_code for node in ended] == [1, 1]
    assert [LOST in node.stderr for node in ended] == [True, True]


@pytest.mark.sweep(0)
def test_when_the_host_of_the_store_is_gone_its_standby_goes_on(launches: Launches, hosts: Hosts) -> None:
    script = launches.script(MEETING)
    nodes = [launch(launches, hosts, name, script) for name in NAMES]
    assert [met(launches, node) for node in nodes] == [{(0, 6)}] * 3
    time.sleep(8.0)  # a standby that has caught up tells nobody
    host = hosts.running("host-a")
    assert host is not None
    hosts.switch.cut_off(host)
    host.kill()
    assert [met(launches, node) for node in nodes[1:]] == [{(1, 4)}] * 2
    (launches.folder / "finish").touch()
    ended = [launches.end(node) for node in nodes[1:]]
    assert [node.exit_code for node in ended] == [0, 0], ended
    assert sum("this node has taken its place" in node.stderr for node in ended) == 1


def losses(folder: Path) -> list[float]:
    """By step."""
    return llama.losses(folder)["loss"] if (folder / "loss.csv").exists() else []


def wait_for_step(folder: Path, num_steps: int) -> None:
    until_s = time.monotonic() + LIMIT_S
    while len(losses(folder)) < num_steps:
        assert time.monotonic() < until_s, losses(folder)
        time.sleep(0.02)  # a file that grows tells nobody


@pytest.mark.sweep(0)
@pytest.mark.timeout(900)
def test_training_shrinks_to_two_hosts_and_grows_back_with_the_same_losses(
    launches: Launches, hosts: Hosts, fork_server: ForkServer, rank_pool: RankPool
) -> None:
    num_steps = 24
    flags = ["--model", "tiny", "--seq", "32", "--batch", "12", "--seed", "1", "--data", str(EXAMPLES)]
    flags += ["--steps", str(num_steps), "--save-every", "4", "--eval-every", "40", "--sample", "0"]
    script = str(EXAMPLES / "train_llama.py")
    out = launches.folder / "disturbed"
    run = partial(launch, launches, hosts, num_workers=1, server=fork_server)
    nodes = [run(name, script, *flags, "--out", out.name) for name in NAMES]
    wait_for_step(out, 6)
    host = hosts.running("host-c")
    assert host is not None
    host.kill()
    heard(nodes[0], "round 1 begins: 2 nodes, 2 workers")
    wait_for_step(out, 6)
    # So slow that not all steps are done before the third host is back.
    hosts.switch.weather = Weather(delay_s=0.01)
    back = run("host-c", script, *flags, "--out", out.name)
    heard(nodes[0], "round 2 begins: 3 nodes, 3 workers")
    hosts.switch.weather = Weather()
    ended = [launches.end(node, LIMIT_S) for node in (nodes[0], nodes[1], back)]
    assert [node.exit_code for node in ended] == [0, 0, 0], ended
    alone = [*flags, "--out", str(launches.folder / "whole")]
    rank_pool.run(1, llama.trained, {"arguments": alone}, timeout_s=LIMIT_S)
    assert len(losses(out)) == num_steps
    # Other numbers of ranks add in another order.
    assert losses(out) == pytest.approx(losses(launches.folder / "whole"), rel=1e-4)
