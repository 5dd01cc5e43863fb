"""Questions to all members: who answers, and what becomes of the threads."""

from __future__ import annotations

import threading

from disttrain.store import HashStore
from disttrain.store.responder import Responder


def test_those_that_are_there_answer_each_question() -> None:
    store = HashStore()
    states = {rank: f"{rank} is well".encode() for rank in range(3)}
    members = [
        Responder(store, "health", rank, lambda about, rank=rank: states[rank] + about.encode()) for rank in range(3)
    ]
    assert members[0].ask([0, 1, 2], 10) == states
    assert members[0].ask([1], 10, " of all") == {1: b"1 is well of all"}
    members[2].close()
    states[1] = b"1 is ill"
    assert members[1].ask([0, 1, 2], 0.05) == {0: states[0], 1: b"1 is ill"}
    for member in members:
        member.close()
        member.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "disttrain health"]
    assert members[0].ask([1], 0.05) == {}
    store.close()


def test_a_notice_is_heard_by_all_and_again_until_it_is_settled() -> None:
    store = HashStore()
    heard: dict[int, list[bytes]] = {rank: [] for rank in range(3)}
    is_done = threading.Semaphore(0)

    def hear(rank: int, notice: bytes) -> bool:
        heard[rank].append(notice)
        is_settled = rank == 0 or heard[rank].count(notice) == 2
        if is_settled:
            is_done.release()
        return is_settled

    members = [
        Responder(store, "news", rank, str.encode, lambda notice, rank=rank: hear(rank, notice)) for rank in (0, 1)
    ]
    assert members[0].tell(b"first", "a name")
    assert members[1].tell(b"another", "a name")  # the first one of a name is the one that counts
    # Who joins later reads what was said before.
    members.append(Responder(store, "news", 2, str.encode, lambda notice: hear(2, notice)))
    for _ in range(3):
        assert is_done.acquire(timeout=20)
    assert heard == {0: [b"first"], 1: [b"first"] * 2, 2: [b"first"] * 2}
    for member in members:
        member.close()
    assert not members[0].tell(b"second", "another name")
    store.close()
