"""Questions to all members: who answers, and what becomes of the threads."""

from __future__ import annotations

import threading

import pytest

from disttrain.store import HashStore, responder
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
        assert is_done.acquire(timeout=60)
    assert heard == {0: [b"first"], 1: [b"first"] * 2, 2: [b"first"] * 2}
    for member in members:
        member.close()
    assert not members[0].tell(b"second", "another name")
    store.close()


@pytest.mark.parametrize("num_questions", [100, 300])
def test_questions_of_a_long_job_do_not_add_up(num_questions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody misses one where several ask while a page is closed, nor a notice that was shown long before."""
    monkeypatch.setattr(responder, "MAX_PAGE_BYTES", 200)
    store = HashStore()
    heard: list[list[bytes]] = [[] for _ in range(4)]
    asked = [0] * 3
    members = [
        Responder(store, "health", rank, str.encode, lambda n, r=rank: not heard[r].append(n)) for rank in range(3)
    ]
    assert members[1].tell(b"ill", "a name")

    def body(rank: int) -> None:
        for number in range(num_questions // 3):
            about = f"{rank} asks {number}"
            assert members[rank].ask([0, 1, 2], 20, about) == dict.fromkeys(range(3), about.encode())
            asked[rank] += 1

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [rank for rank, num_asked in enumerate(asked) if num_asked != num_questions // 3] == []
    members.append(Responder(store, "health", 3, str.encode, lambda notice: not heard[3].append(notice)))
    assert members[0].ask([3], 20, "late") == {3: b"late"}
    assert heard == [[b"ill"]] * 4
    pages = store.list_keys("health/board")
    assert len(pages) <= 5
    assert sum(len(store.get(page)) for page in pages) < 4000
    assert store.list_keys("health/answers") == []
    for member in members:
        member.close()
    store.close()


def test_an_answer_that_came_late_is_cleared() -> None:
    store = HashStore()
    may_answer = threading.Event()
    members = [Responder(store, "health", 0, str.encode)]
    members.append(Responder(store, "health", 1, lambda about: str(may_answer.wait(20)).encode()))
    assert members[0].ask([1], 0.05) == {}
    may_answer.set()
    assert members[0].ask([1], 20) == {1: b"True"}
    assert members[0].ask([0], 20) == {0: b""}
    assert [store.queue_len(f"health/answers/0.{number}") for number in (1, 2, 3)] == [0, 0, 0]
    for member in members:
        member.close()
    store.close()


@pytest.mark.parametrize("num_groups", [20, 200])
def test_notices_that_are_settled_do_not_add_up(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responder, "MAX_PAGE_BYTES", 200)
    store = HashStore(20.0)
    members = [Responder(store, "job", rank, str.encode, lambda notice: False) for rank in range(2)]
    kept = b"for all times"
    assert members[0].tell(kept, "kept")
    for number in range(num_groups):
        teller = members[number % 2]
        assert teller.tell(b"connect %d" % number, f"connect/{number}")
        members[1 - number % 2].settle(f"connect/{number}")  # another's
        assert store.check([f"job/notice/connect/{number}"])
        teller.settle(f"connect/{number}")
        if number % 10 == 9:  # both have read all by then
            assert len(teller.ask([0, 1], 20.0)) == 2
    assert sum(map(len, map(store.get, store.list_keys("job/board")))) < 1000
    assert store.list_keys("job/notice/") == ["job/notice/kept"]
    heard: list[bytes] = []
    late = Responder(store, "job", 2, str.encode, lambda notice: not heard.append(notice))
    assert len(members[0].ask([2], 20.0)) == 1
    assert heard == [kept]
    for member in (*members, late):
        member.close()
