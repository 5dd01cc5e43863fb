"""The node with the job's store is killed: another has its standby, and the job goes on there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.multirank.launch.test_launch_elastic import TELLING, port, start, told

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

__all__ = ["port"]
SOON_S = 40.0


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
            if store_of(node) is not None:
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
