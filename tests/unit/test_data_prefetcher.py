"""Batches that a thread makes ahead: in order, with the state of what was handed out, and no thread that is left."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from disttrain.checkpoint import PerRank, load, save
from disttrain.data import Loader, Prefetcher
from disttrain.errors import DataError

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    deadline_s = time.monotonic() + LIMIT_S
    while any(thread.name == "disttrain-data" for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s, "a thread is left"
        time.sleep(0.001)


def alone(num_samples: int, batch_size: int, **others: Any) -> Loader:
    return Loader(range(num_samples), batch_size, replica=0, num_replicas=1, seed=3, **others)


class Watched:
    """Counts, and notes how many it has made; `stops_at` raises."""

    def __init__(self, num_batches: int, stops_at: int = -1) -> None:
        self.num_batches, self.stops_at = num_batches, stops_at
        self.at = 0
        self.made = threading.Semaphore(0)

    def __iter__(self) -> Iterator[int]:
        while self.at < self.num_batches:
            if self.at == self.stops_at:
                self.stops_at = -1
                raise OSError("the disk is gone")
            self.at += 1
            self.made.release()
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def test_batches_come_in_order_epoch_by_epoch() -> None:
    expected = alone(10, 4)
    batches = Prefetcher(alone(10, 4))
    for _ in range(3):
        assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in expected]


def test_no_more_is_made_than_may_wait() -> None:
    source = Watched(100)
    with Prefetcher(source, num_ahead=3) as batches:
        assert next(batches) == 0
        # Three wait, and one is in the thread's hands.
        for _ in range(5):
            assert source.made.acquire(timeout=LIMIT_S)
        assert not source.made.acquire(timeout=0.05)


def test_the_state_is_that_of_the_last_batch_handed_out() -> None:
    source = Watched(9)
    with Prefetcher(source, num_ahead=4) as batches:
        assert batches.state_dict() == {"at": 0}
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        for _ in range(7):
            assert source.made.acquire(timeout=LIMIT_S)
        assert batches.state_dict() == {"at": 3}
        batches.load_state_dict({"at": 1})
        assert batches.state_dict() == {"at": 1}
        assert [next(batches) for _ in range(3)] == [1, 2, 3]
    # What was read ahead is given back.
    assert source.state_dict() == batches.state_dict() == {"at": 4}


@pytest.mark.parametrize("num_taken", [0, 1, 5, 12])
def test_a_checkpoint_goes_on_where_the_trainer_was(tmp_path: Any, num_taken: int) -> None:
    undisturbed = [batch.tolist() for batch in itertools.islice(alone(10, 4, endless=True), 20)]
    with Prefetcher(alone(10, 4, endless=True)) as batches:
        seen = [next(batches).tolist() for _ in range(num_taken)]
        save({"data": batches}, tmp_path / "save")
    with Prefetcher(alone(10, 4, endless=True)) as batches:
        next(batches)
        load({"data": batches}, tmp_path / "save")
        seen += [next(batches).tolist() for _ in range(20 - num_taken)]
    assert seen == undisturbed


def test_an_error_comes_in_its_turn_and_the_next_call_goes_on() -> None:
    with Prefetcher(Watched(6, stops_at=3)) as batches:
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(batches)
        assert "Watched" in str(caught.value.__traceback__ and caught.traceback[-1].locals["self"])
        assert list(batches) == [3, 4, 5]


def test_a_batch_that_does_not_come_is_told_with_the_line() -> None:
    released = threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        released.wait(LIMIT_S)

    batches = Prefetcher(stuck(), timeout_s=1.0)
    assert next(batches) == 0
    with pytest.raises(DataError, match=r"no batch has come within 1 s; its thread is at .*threading\.py:\d+, in"):
        next(batches)
    released.set()
    batches.close()
    with pytest.raises(DataError, match=r"it is closed\. Make another one"):
        next(batches)


def test_one_that_nobody_has_any_more_ends() -> None:
    batches = Prefetcher(Watched(100))
    next(batches)
    del batches


def test_torchs_loaders_are_sources_too() -> None:
    plain = Prefetcher(DataLoader(list(range(6)), batch_size=2))
    for _ in range(2):
        assert [batch.tolist() for batch in plain] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(
        DataError, match=r"a DataLoader has no state_dict and load_state_dict\. Give a Loader or torchdata's"
    ):
        plain.state_dict()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_goes_on_from_its_own_state(tmp_path: Any) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def made(num_workers: int) -> Any:
        torch.manual_seed(0)
        return stateful.StatefulDataLoader(list(range(12)), batch_size=2, shuffle=True, num_workers=num_workers)

    whole = [batch.tolist() for batch in made(0)]
    with Prefetcher(made(0), num_ahead=3) as batches:
        seen = [next(batches).tolist() for _ in range(2)]
        save({"data": PerRank(batches)}, tmp_path / "save")
    with Prefetcher(made(0)) as batches:
        load({"data": PerRank(batches)}, tmp_path / "save")
        assert seen + [batch.tolist() for batch in batches] == whole


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_tensors_move_wherever_they_stand() -> None:
    tensor = torch.arange(3.0)
    batch = {"a": [tensor, (tensor, "text")], "b": Pair(tensor, 3), "c": OrderedDict(d=tensor)}
    with Prefetcher([batch], "meta") as batches:
        moved = next(batches)
    assert moved["b"].left.device.type == moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert (moved["a"][1][1], moved["b"].right, moved["c"]["d"].shape) == ("text", 3, (3,))
    with pytest.raises(DataError, match="num_ahead is 0"):
        Prefetcher([batch], num_ahead=0)


def test_a_trace_shows_how_long_the_trainer_waits() -> None:
    with torch.profiler.profile() as profile, Prefetcher(iter([torch.ones(1)])) as batches:
        next(batches)
    assert any(event.name == "data wait" for event in profile.events())
