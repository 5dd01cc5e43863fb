"""How many requests many ranks make of their store when something is wrong: as many for each, whatever their number."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import pytest

from disttrain.checkpoint.saving.assembly import Assembly
from disttrain.checkpoint.saving.consensus import Consensus, asking
from disttrain.errors import CollectiveTimeoutError, RendezvousError, StoreTimeoutError
from disttrain.process_group.joining.rendezvous import RendezvousInfo, join
from disttrain.process_group.watching.comparing import look_for_gone
from disttrain.process_group.watching.departures import RANKS_PER_PAGE, members_left, say_left
from disttrain.process_group.watching.recorded_alike import _Meeting
from disttrain.process_group.watching.roll_call import absent_text
from disttrain.ranks import Ranks
from disttrain.store import HashStore
from disttrain.store.attendance import once
from disttrain.store.protocol.wire import Answer, Op
from disttrain.store.rank_runs import from_runs, in_words, is_among, to_runs
from disttrain.store.responder import Responder
from disttrain.store.slices import in_slices


class CountingStore(HashStore):
    """Counts what is asked of it and its clones, and the bytes of the answers."""

    def __init__(self, timeout: Any = 300.0) -> None:
        super().__init__(timeout)
        self.asked: Counter[str] = Counter()
        self.num_bytes = 0

    def clone(self) -> Self:
        other = super().clone()
        other.asked = self.asked
        return other

    def _request(self, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer:
        self.asked[op.name] += 1
        return super()._request(op, arguments, wait_s)


def in_threads(num_threads: int, body: Any) -> None:
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def absent_from(num_ranks: int) -> tuple[Counter[str], set[str]]:
    """What the others ask, and are told, when the last rank never comes."""
    store, told, together = CountingStore(), [], threading.Barrier(num_ranks - 1)

    def body(rank: int) -> None:
        together.wait(60.0)
        with pytest.raises(RendezvousError) as raised:
            join(store, RendezvousInfo(rank, num_ranks), 2.0)
        told.append(raised.value.problem)

    in_threads(num_ranks - 1, body)
    assert len(told) == num_ranks - 1
    return store.asked, set(told)


@pytest.mark.parametrize("num_ranks", [8, 32])
def test_one_rank_asks_who_has_not_come(num_ranks: int) -> None:
    asked, told = absent_from(num_ranks)
    assert told == {f"after 2 s ranks [{num_ranks - 1}] of {num_ranks} had not come."}
    assert asked["LIST_KEYS"] == 1
    assert asked["CHECK"] == 0
    assert sum(asked.values()) <= 9 * num_ranks


def test_a_rank_that_is_alone_asks_no_more_in_a_larger_world() -> None:
    counts = []
    for num_ranks in (64, 16_384):
        store = CountingStore()
        with pytest.raises(RendezvousError, match=rf"ranks \[1-{num_ranks - 1}\] of {num_ranks} had not come"):
            join(store, RendezvousInfo(0, num_ranks), 0.01)
        counts.append(sum(store.asked.values()))
    assert counts[0] == counts[1] <= 9


def test_of_many_one_computes_and_another_where_that_one_is_gone() -> None:
    store = HashStore()
    results, computed = [], []

    def body(rank: int) -> None:
        def compute() -> str:
            computed.append(rank)
            return str(rank)

        results.append(once(store, "who", compute))

    in_threads(8, body)
    assert len(computed) == 1
    assert results == [str(computed[0])] * 8
    store.add("other/tries/0", 1)  # by one that has died since
    assert once(store, "other", lambda: "second", patience_s=0.01) == "second"
    store.set("known", "said before")
    assert once(store, "known", lambda: "other") == "said before"


@pytest.mark.parametrize("num_members", [4, 12])
def test_only_those_that_are_asked_answer(num_members: int) -> None:
    store = CountingStore()
    members = [Responder(store, "health", rank, str.encode) for rank in range(num_members)]
    assert members[0].ask([1, 3], 10.0, "well") == {1: b"well", 3: b"well"}
    assert store.asked["QUEUE_PUSH"] == 2
    assert store.asked["QUEUE_POP"] == 2
    assert store.list_keys("health/answers") == []
    for member in members:
        member.close()


@pytest.mark.parametrize("num_ranks", [4, 16])
def test_one_rank_asks_for_all_where_the_absent_are(num_ranks: int) -> None:
    store, texts = CountingStore(), []
    absent_rank = num_ranks - 1

    def answer(rank: int, about: str) -> bytes:
        come_to = [0, ""] if rank == absent_rank else [7, "barrier"]
        return json.dumps({"come_to": come_to, "call": None, "place": f"line {about}"}).encode()

    witnesses = [Responder(store, "witness", rank, partial(answer, rank)) for rank in range(num_ranks)]

    def body(rank: int) -> None:
        world = SimpleNamespace(rank=rank, store=store, witness=witnesses[rank])
        group: Any = SimpleNamespace(world=world, group_name="world", ranks=tuple(range(num_ranks)))
        texts.append(absent_text(group, 7, None))

    in_threads(num_ranks - 1, body)
    told = f': rank {absent_rank} is at no collective of the group yet and now at line ["world", 7]'
    assert texts == [told] * (num_ranks - 1)
    assert store.asked["APPEND"] == 1
    assert store.asked["QUEUE_PUSH"] == num_ranks
    assert store.asked["QUEUE_POP"] == num_ranks
    # Who comes later is not among those that came then, and asks anew.
    late = SimpleNamespace(rank=absent_rank, store=store, witness=witnesses[absent_rank])
    group: Any = SimpleNamespace(world=late, group_name="world", ranks=tuple(range(num_ranks)))
    assert absent_text(group, 7, None) == ": all ranks came, but not all in time"
    assert store.asked["APPEND"] == 2
    for witness in witnesses:
        witness.close()


@pytest.mark.parametrize("num_ranks", [8, 32])
def test_one_rank_asks_for_all_who_has_not_recorded(num_ranks: int) -> None:
    """Who has come is read once when they ask, and once when their time is over, however many wait."""
    store, told = CountingStore(), []

    def body(rank: int) -> None:
        group: Any = SimpleNamespace(
            world=SimpleNamespace(rank=rank, store=store, witness=None), group_name="world", group_size=num_ranks,
            members=Ranks.of(range(num_ranks)), num_agreed={}, timeout_s=1.2, ended_by="", ranks_text=lambda: "all",
        )  # fmt: skip
        meeting = _Meeting(group, 0, [{"fields": {"operation": "all_reduce"}, "text": "all_reduce"}])
        meeting.come()
        with pytest.raises(CollectiveTimeoutError) as raised:
            meeting.wait()
        told.append(raised.value.problem)

    in_threads(num_ranks - 1, body)
    problem = f"this rank has recorded the step, and rank {num_ranks - 1} did not within 1.2 s, nor called it."
    assert told == [problem] * (num_ranks - 1)
    assert store.asked["MULTI_GET"] <= 2
    assert store.asked["CHECK"] <= num_ranks + 1  # of each whether what it has recorded is known, and of the one page
    assert sum(store.asked.values()) <= 25 * num_ranks


@pytest.mark.parametrize("num_ranks", [8, 100])
def test_who_decides_on_a_save_asks_for_all_at_once(num_ranks: int) -> None:
    """While it waits for the others, who has not come yet; then what they say."""
    own, others = CountingStore(), []
    others_store = own.clone()
    others_store.asked = Counter()

    def vote(rank: int) -> None:
        others.append(Assembly("save", rank, num_ranks, others_store).agree(lambda: rank, sum))

    late = threading.Timer(0.3, in_threads, (num_ranks - 1, lambda number: vote(number + 1)))
    late.start()
    assert Assembly("save", 0, num_ranks, own).agree(lambda: 0, sum) == sum(range(num_ranks))
    late.join(60.0)
    assert others == [sum(range(num_ranks))] * (num_ranks - 1)
    assert own.asked["CHECK"] == 0
    assert own.asked["GET"] == 0
    assert own.asked["MULTI_GET"] <= 2
    assert sum(own.asked.values()) < 30


@pytest.mark.parametrize("size", [8, 4096])
def test_few_members_of_a_save_look_after_the_others_while_they_wait(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others ask for the answer again when they have waited for twice as long."""
    assert asking(size) == {0, size // 2, size - 1}
    assert Consensus("save", alone=True)._longest_slice_s == math.inf
    num_asked = {}
    for longest_s, timeout_s in ((0.5, 600.0), (math.inf, 600.0), (math.inf, 6000.0), (8.0, 600.0)):
        clock_s, slices_s = [0.0], []

        def wait(slice_s: float, clock_s: list[float] = clock_s, slices_s: list[float] = slices_s) -> None:
            clock_s[0] += slice_s
            slices_s.append(slice_s)
            raise StoreTimeoutError("wait", "not yet.")

        monkeypatch.setattr(time, "monotonic", lambda clock_s=clock_s: clock_s[0])
        with pytest.raises(StoreTimeoutError, match=f"within {timeout_s:g} s"):
            in_slices(["answer"], wait, timeout_s, lambda: None, longest_s)
        assert max(slices_s) <= max(longest_s, 0.5)
        num_asked[longest_s, timeout_s] = len(slices_s)
    assert [*num_asked.values()] == [1201, 12, 15, 80]


def test_runs_say_what_the_ranks_were() -> None:
    for ranks in ([], [5], [0, 1], [7, 3], list(range(9)), list(range(0, 64, 8)), [0, 1, 2, 8, 16, 24, 25]):
        runs = to_runs(ranks)
        assert from_runs(runs) == ranks
        assert [rank for rank in range(70) if is_among(runs, rank)] == sorted(ranks)
    assert to_runs(range(0, 4096, 8)) == "0:512:8"
    assert in_words([]) == ""
    assert in_words([0, 2, 3, 5, 6, 7, 9]) == "0, 2, 3, 5-7, 9"
    assert in_words(range(0, 1000, 2)).endswith(", 398 and 300 more")


@pytest.mark.parametrize("num_ranks", [256, 4096])
def test_who_leaves_writes_no_more_the_more_ranks_have_left(num_ranks: int) -> None:
    store = CountingStore()
    for rank in range(num_ranks - 1):
        say_left(store, rank, {"world": 7, "dp": rank % 5})
    assert sum(store.asked.values()) <= 2.1 * num_ranks
    pages = store.list_keys("left/")
    assert max(len(store.get(page)) for page in pages) <= RANKS_PER_PAGE * 64
    assert len(store.get("left")) <= 5 * num_ranks // RANKS_PER_PAGE

    def group(name: str, ranks: range) -> Any:
        return SimpleNamespace(
            world=SimpleNamespace(store=store), group_name=name, members=Ranks.of(ranks), group_size=len(ranks),
            ended_by=[],
            find_reason=lambda: "", end=ended.append,
        )  # fmt: skip

    ended: list[str] = []
    world = group("world", range(num_ranks))
    assert members_left(world) == dict.fromkeys(range(num_ranks - 1), 7)
    assert members_left(group("dp", range(3, num_ranks, num_ranks // 4))) == {
        rank: rank % 5 for rank in range(3, num_ranks, num_ranks // 4) if rank < num_ranks - 1
    }
    # A rank that waits reads as much as it takes to find one that cannot come, however many have left.
    store.asked.clear()
    look_for_gone(world, 8)
    assert "rank 0 has left the job after sequence 7" in ended[0]
    assert dict(store.asked) == {"CHECK": 1, "GET": 1, "MULTI_GET": 1}
