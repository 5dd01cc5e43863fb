"""The node with the job's store is killed: another has its standby, and the job goes on there."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psutil

from tests.multirank.launch.test_launch_elastic import TELLING, start, told

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

SOON_S = 160.0


def store_of(node: subprocess.Popen[str]) -> psutil.Process | None:
    """The process of the store, or of its standby, that a launcher has started."""
    for child in psutil.Process(node.pid).children():
        if "disttrain.store.server" in child.cmdline():
            return child
    return None


def wait_for_standby(nodes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """The launcher that keeps the standby, once that has had time to catch up."""
    until_s = time.monotonic() + SOON_S
    while time.monotonic() < until_s:
        for node in nodes:
            standby = store_of(node)
            # Until it has found the store, which takes seconds where all cores are busy, there is nothing to catch up.
            if standby is not None and any(one.status == psutil.CONN_ESTABLISHED for one in standby.net_connections()):
                time.sleep(2.0)
                return node
        time.sleep(0.1)
    raise AssertionError("no node keeps a standby")


def test_the_job_goes_on_when_the_node_with_its_store_is_killed(launches: Launches, port: int) -> None:
    script = launches.script(TELLING)
    nodes = [start(launches, port, "1:3", "--node-rank", str(rank), script) for rank in range(3)]
    assert [told(launches, node)[:4] for node in nodes] == [[rank, 3, rank, 0] for rank in range(3)]
    wait_for_standby(nodes[1:])
    nodes[0].kill()
    assert sorted(told(launches, node)[:4] for node in nodes[1:]) == [[0, 2, 0, 1], [1, 2, 1, 1]]
    (launches.folder / "finish").touch()
    ended = [launches.end(node) for node in nodes[1:]]
    assert [node.exit_code for node in ended] == [0, 0], ended
    texts = "".join(node.stderr for node in ended)
    assert "node 0 is lost, and this node has taken its place" in texts


def test_when_only_the_store_dies_nobody_notices(forked_launches: Launches, port: int) -> None:
    script = forked_launches.script("""
        import os, time
        import disttrain
        disttrain.init_process_group(timeout=240)
        print("in", flush=True)
        until_s = time.monotonic() + 300
        while not os.path.exists("finish") and time.monotonic() < until_s:
            time.sleep(0.05)
        group = disttrain.new_group(backend="gloo")
        disttrain.barrier(group)
        print("round", os.environ["DISTTRAIN_ROUND"], "of", disttrain.get_world_size())
        disttrain.destroy_process_group()
    """)
    nodes = [start(forked_launches, port, "1:3", "--node-rank", str(rank), script) for rank in range(3)]
    for node in nodes:
        forked_launches.ready(node, 1)
    wait_for_standby(nodes[1:])
    store = store_of(nodes[0])
    assert store is not None
    store.send_signal(signal.SIGKILL)
    time.sleep(1.0)
    (forked_launches.folder / "finish").touch()
    ended = [forked_launches.end(node) for node in nodes]
    assert [(node.exit_code, node.lines) for node in ended] == [(0, [f"[rank {r}] round 0 of 3"]) for r in range(3)]


def test_who_takes_node_0s_place_may_be_killed_as_well(launches: Launches, port: int) -> None:
    script = launches.script(TELLING)
    nodes = [start(launches, port, "1:3", "--node-rank", str(rank), script) for rank in range(3)]
    for node in nodes:
        told(launches, node)
    second = wait_for_standby(nodes[1:])
    (third,) = [node for node in nodes[1:] if node is not second]
    nodes[0].kill()
    assert [told(launches, node)[1:4] for node in (second, third)] == [[2, 0, 1], [2, 1, 1]]
    wait_for_standby([third])
    second.kill()
    assert told(launches, third)[:4] == [0, 1, 0, 2]
    (launches.folder / "finish").touch()
    assert launches.end(third).exit_code == 0


def test_without_a_standby_the_job_ends_with_node_0(launches: Launches, port: int) -> None:
    script = launches.script(TELLING)
    nodes = [start(launches, port, "1:2", "--node-rank", str(rank), "--no-standby", script) for rank in range(2)]
    for node in nodes:
        told(launches, node)
    assert store_of(nodes[1]) is None
    nodes[0].kill()
    ended = launches.end(nodes[1])
    assert ended.exit_code == 1
    assert "node 0's store at" in ended.stderr


def test_a_node_0_that_falls_silent_is_replaced_and_told(launches: Launches, port: int) -> None:
    script = launches.script(TELLING)
    nodes = [start(launches, port, "1:3", "--node-rank", str(rank), script) for rank in range(3)]
    for node in nodes:
        told(launches, node)
    wait_for_standby(nodes[1:])
    frozen = [psutil.Process(nodes[0].pid), *psutil.Process(nodes[0].pid).children(recursive=True)]
    for process in frozen:
        process.suspend()
    assert sorted(told(launches, node)[:4] for node in nodes[1:]) == [[0, 2, 0, 1], [1, 2, 1, 1]]
    for process in frozen:
        process.resume()
    first = launches.end(nodes[0])
    assert first.exit_code == 1
    assert "another has taken its place as node 0" in first.stderr
    (launches.folder / "finish").touch()
    assert [launches.end(node).exit_code for node in nodes[1:]] == [0, 0]
