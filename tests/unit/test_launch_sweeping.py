"""Removing what earlier rounds left in the store."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest

from disttrain.store import HashStore
from disttrain_launch.rendezvous.sweeping import Sweeper


def test_what_old_rounds_left_in_the_store_goes() -> None:
    store = HashStore()
    kept = {"round-1/job/1/a", "round-2/job/1/a", "round-10/job/1/a", "mine"}
    for key in {"round-0/job/1/a", "round-0/job/2/b", *kept}:
        store.set(key, "")
    sweeper = Sweeper(lambda: nullcontext(store))
    for number in range(3):
        sweeper.begun(number, [])
    until_s = time.monotonic() + 60.0
    while set(store.list_keys()) != kept and time.monotonic() < until_s:
        time.sleep(0.001)  # a sweep tells nobody
    assert set(store.list_keys()) == kept


@pytest.mark.parametrize("num_rounds", [20, 200])
def test_the_store_of_a_job_does_not_grow_with_its_rounds(num_rounds: int) -> None:
    """Each round another node takes the place of one that has gone, and a worker is late."""
    store = HashStore()
    sweeper = Sweeper(lambda: nullcontext(store))
    most_keys = 0
    for number in range(num_rounds):
        agents = ["agent-0", f"agent-{number + 1}"]
        for agent in agents:
            for kind in ("beat", "node", "word", "status"):
                store.set(f"launch/{kind}/{agent}", "")
        for key in ("join/terms", "join/rank/0", "join/rank/1", "host/0", "left", "witness/board"):
            store.set(f"round-{number}/job/1/{key}", "")
        if number > 2:
            store.set(f"round-{number - 3}/job/1/late", "")
        sweeper.begun(number, agents)
        for thread in threading.enumerate():
            if thread.name == "sweeper":
                thread.join(60.0)
        most_keys = max(most_keys, store.num_keys())
    assert most_keys <= 30
    assert set(store.list_keys("launch/beat/")) == {
        f"launch/beat/agent-{number}" for number in (0, num_rounds - 1, num_rounds)
    }
