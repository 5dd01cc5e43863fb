"""Ranks that record different steps as graphs all hear so before one of them is launched, and nobody waits for long.

Recorded by hand: each rank lists what it calls in a world without peers, which has the job's own store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import disttrain
from disttrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CompileError, DisttrainError
from disttrain.flight_recorder import FlightRecorder
from disttrain.flight_recorder.record.recall import recall
from disttrain.process_group import World, current_world, entered_world
from disttrain.process_group.backends.fake import FakeBackend
from disttrain.process_group.watching.recorded_alike import Agreement
from disttrain.process_group.watching.replaying import listed_operations
from disttrain.store import HashStore, PrefixStore
from disttrain.testing import run_threads


@pytest.fixture(autouse=True)
def peers_that_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport without peers stands for one whose calls are recorded, and not carried out."""
    monkeypatch.setattr(FakeBackend, "has_peers", True)


WITHIN_S = 40.0
"""A second, on a machine that does nothing else."""
Step = Callable[[World], object]


@contextmanager
def world_without_peers(name: str, timeout_s: float = 60.0) -> Iterator[World]:
    outer = current_world()
    store = PrefixStore(name, outer.store)
    world = World(store, outer.rank, outer.world_size, backend="fake", timeout_s=timeout_s, device=torch.device("cpu"))
    recorder = FlightRecorder()
    recorder.attach(world)
    world.recall = partial(recall, recorder)
    world.become_witness()
    disttrain.barrier()
    with entered_world(world):
        yield world
        # Who has gone answers no more.
        disttrain.barrier(outer.default_group)


def record(world: World, step: Step, expected: tuple[str, ...] = ("world",)) -> None:
    agreement = Agreement(world, expected)
    assert world.recorder is not None
    try:
        recorder: Any = world.recorder
        with recorder.listing(None, lambda tensors, group: True) as listing:
            step(world)
        agreement.agree(listing.recorded())
    except Exception as error:
        agreement.refuse(error)
        raise


def reduce(*sizes: int) -> Step:
    def step(world: World) -> None:
        for size in sizes:
            disttrain.all_reduce(torch.ones(size), group=world.default_group)

    return step


def gather(world: World) -> None:
    disttrain.all_reduce(torch.ones(2))
    disttrain.all_gather_into_tensor(torch.ones(4 * world.world_size), torch.ones(4))


def fail(world: World) -> None:
    disttrain.all_reduce(torch.ones(2))
    raise CompileError("capture_step", ".item() has the host wait.", "Take it out.")


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_record_alike_go_on(world_size: int) -> None:
    def run() -> None:
        with world_without_peers("alike") as world:
            for _ in range(2):
                record(world, reduce(2, 3))
            assert world.default_group.sequence == 4

    run_threads(world_size, run)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["operation", "size", "fewer", "none"])
def test_ranks_that_record_other_things_all_hear_the_same(world_size: int, kind: str) -> None:
    def run() -> None:
        odd, words = {
            "operation": (
                gather,
                "collective 2 of the recording: operation: all_reduce on rank.*all_gather_into_tensor",
            ),
            "size": (reduce(2, 5), r"collective 2 of the recording: sizes: \[3\] on rank.*\[5\] on rank"),
            "fewer": (
                reduce(2),
                r"collective 2 of the recording: rank \d recorded no more than 1; ranks? .*float32\[3\]",
            ),
            "none": (reduce(), "collective 1 of the recording: rank . recorded no more than 0"),
        }[kind]
        with world_without_peers(f"other {kind}") as world:
            begun_s = time.monotonic()
            is_odd = world.rank == world.world_size - 1
            with pytest.raises(CollectiveMismatchError, match=f"ranks recorded different things: {words}") as told:
                record(world, odd if is_odd else reduce(2, 3))
            assert time.monotonic() - begun_s < WITHIN_S
            assert "test_recorded_alike.py:" in str(told.value)
            # All count alike, and may record anew what is alike.
            record(world, reduce(4))
            assert world.default_group.sequence == 1

    run_threads(world_size, run)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_cannot_record_is_named_by_all(world_size: int) -> None:
    def run() -> None:
        with world_without_peers("cannot") as world:
            begun_s = time.monotonic()
            with pytest.raises(CompileError, match=r"\.item\(\) has the host wait") as told:
                record(world, fail if world.rank == 0 else reduce(2, 3))
            assert time.monotonic() - begun_s < WITHIN_S
            assert world.rank == 0 or "rank 0 could not record the step" in str(told.value)
            assert world.default_group.sequence == 0

    run_threads(world_size, run)


@pytest.mark.parametrize("world_size", [3])
def test_a_rank_that_hears_it_in_one_group_tells_its_others(world_size: int) -> None:
    """Ranks 0 and 1 differ; rank 2, which shares another group with rank 1, must not wait for it."""

    def run() -> None:
        with world_without_peers("spread") as world:
            groups = [world.new_group([0, 1]), world.new_group([1, 2])]

            def step(world: World) -> None:
                for group in groups:
                    if world.rank in getattr(group, "ranks", ()):
                        odd = int(world.rank == 0)
                        disttrain.all_reduce(torch.ones(2 + odd), group=group)  # type: ignore[arg-type]
                        disttrain.all_reduce(torch.ones(2), group=group)  # type: ignore[arg-type]

            if world.rank == 2:
                record(world, step, ())
            else:
                with pytest.raises(CollectiveMismatchError, match=r"sizes: \[3\] on rank 0, \[2\] on rank 1"):
                    record(world, step, ())

    run_threads(world_size, run)


@pytest.mark.parametrize("world_size", [2, 3])
def test_who_runs_the_same_step_as_it_is_is_no_hindrance(world_size: int) -> None:
    def run() -> None:
        with world_without_peers("as it is") as world:
            begun_s = time.monotonic()
            if world.rank == 0:
                reduce(2, 3)(world)
            else:
                record(world, reduce(2, 3))
            assert time.monotonic() - begun_s < WITHIN_S
            assert world.default_group.sequence == 2
            record(world, reduce(5))

    run_threads(world_size, run)


@pytest.mark.parametrize("world_size", [2, 3])
def test_who_runs_another_step_as_it_is_ends_the_group(world_size: int) -> None:
    def run() -> None:
        with world_without_peers("another") as world:
            begun_s = time.monotonic()
            if world.rank == 0:
                reduce(7)(world)
                while not world.default_group.ended_by and time.monotonic() < begun_s + WITHIN_S:
                    time.sleep(0.01)
                reason = world.default_group.ended_by
            else:
                with pytest.raises(DisttrainError) as told:
                    record(world, reduce(2, 3))
                reason = str(told.value)
            assert time.monotonic() - begun_s < WITHIN_S
            assert r"sizes: [2] on rank" in reason or r"sizes: [7] on rank 0" in reason
            assert "test_recorded_alike.py:" in reason

    run_threads(world_size, run)


@pytest.mark.parametrize("world_size", [2, 3])
def test_who_does_not_come_is_named_within_the_timeout(world_size: int) -> None:
    def run() -> None:
        with world_without_peers("absent", timeout_s=1.0) as world:
            if world.rank == 0:
                return
            begun_s = time.monotonic()
            with pytest.raises(CollectiveTimeoutError, match=r"and rank 0 did not within 1 s, nor called it"):
                record(world, reduce(2))
            assert time.monotonic() - begun_s < WITHIN_S

    run_threads(world_size, run)


@pytest.mark.parametrize("world_size", [2])
def test_without_a_recorder_nobody_waits(world_size: int) -> None:
    def run() -> None:
        with world_without_peers("unrecorded") as world:
            world.recorder = None
            agreement = Agreement(world, ("world",))
            with listed_operations() as untold:
                reduce(*range(1, 2 + world.rank))(world)
            agreement.agree(untold.recorded())

    run_threads(world_size, run)


def test_nobody_waits_for_ranks_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBackend, "has_peers", False)
    world = World(HashStore(), 0, 2, backend="fake", timeout_s=60.0, device=torch.device("cpu"))
    FlightRecorder().attach(world)
    begun_s = time.monotonic()
    with entered_world(world):
        record(world, reduce(2))
    assert time.monotonic() - begun_s < 40.0
