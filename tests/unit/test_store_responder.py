"""Questions to all members: who answers, and what becomes of the threads."""

from __future__ import annotations

import threading

from disttrain.store import HashStore
from disttrain.store.responder import Responder


def test_those_that_are_there_answer_each_question() -> None:
    store = HashStore()
    states = {rank: f"{rank} is well".encode() for rank in range(3)}
    members = [Responder(store, "health", rank, lambda rank=rank: states[rank]) for rank in range(3)]
    assert members[0].ask([0, 1, 2], 10) == states
    members[2].close()
    states[1] = b"1 is ill"
    assert members[1].ask([0, 1, 2], 0.05) == {0: states[0], 1: b"1 is ill"}
    for member in members:
        member.close()
        member.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "disttrain health"]
    assert members[0].ask([1], 0.05) == {}
    store.close()
