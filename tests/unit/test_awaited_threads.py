"""Threads that come back from C++ while the interpreter ends would take the process with them: it waits for them."""

from __future__ import annotations

import subprocess
import sys
import threading

import disttrain
from disttrain._python.awaited_threads import AwaitedThreads
from disttrain.process_group.joining.connecting import Connecting
from disttrain.ranks import Ranks
from disttrain.store import HashStore

ENDING = """
import os, time
from disttrain._python.awaited_threads import AWAITED

def work():
    time.sleep(0.5)
    print("done", os.getpid() == parent, flush=True)

parent = os.getpid()
AWAITED.start(work, "worker")
if not os.fork():
    # A child begins anew.
    AWAITED.start(work, "worker")
"""


def test_the_interpreter_waits_for_them_at_its_end() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=240, check=True)
    assert sorted(ended.stdout.splitlines()) == ["done False", "done True"]


def test_none_is_started_once_it_ends() -> None:
    threads, ran = AwaitedThreads(), threading.Event()
    thread = threads.start(ran.set, "worker")
    assert thread is not None
    threads.close()
    assert not thread.is_alive()
    assert ran.is_set()
    assert threads.start(ran.clear, "late") is None
    assert ran.is_set()


def test_a_rank_that_ends_connects_no_more() -> None:
    world = disttrain.World(HashStore(), 0, 2, backend="fake", timeout_s=60)
    connecting = Connecting(world)
    request = {"connect": "later", "ranks": Ranks.of(range(2)).plain(), "device_type": "cpu", "backend": None}
    connecting.close()
    connecting.hear({**request, "timeout_s": 60})
    assert not [thread for thread in threading.enumerate() if thread.name == "disttrain connecting"]
