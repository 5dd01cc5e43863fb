"""Runs in which nothing is wrong, whatever they do."""

from __future__ import annotations

import time

import torch

import disttrain
from disttrain.errors import DisttrainError
from disttrain.flight_recorder.analysis.verdict import Kind
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.steps import group_of, step, train
from tests.flight_corpus.tensors import ones
from tests.flight_corpus.training import meshed, pipeline, sharded

CASES: Cases = []


def healthy(**more: object):  # type: ignore[no-untyped-def]
    return labelled(CASES, Kind.NOTHING_WRONG, **more)


@healthy()
def all_reduces(_rank: int) -> None:
    train(50)


@healthy()
def more_records_than_a_ring_holds(_rank: int) -> None:
    train(2500)


@healthy()
def every_collective(_rank: int) -> None:
    for size in (3, 6, 9):
        step(size=size)
        disttrain.broadcast(ones(size), 1)
        disttrain.reduce(ones(size), 2)
        disttrain.all_gather_into_tensor(ones(3 * size), ones(size))
        disttrain.reduce_scatter_tensor(ones(size // 3), ones(size))
        disttrain.all_to_all_single(ones(size), ones(size))
        disttrain.barrier()


@healthy()
def sizes_that_grow(_rank: int) -> None:
    for size in range(1, 40):
        step(size=size)


@healthy()
def uneven_all_to_all(rank: int) -> None:
    for _ in range(5):
        sizes = [rank + 1] * 3
        disttrain.all_to_all_single(ones(6), ones(sum(sizes)), [1, 2, 3], sizes)


@healthy(num_ranks=4)
def groups_of_two(rank: int) -> None:
    group = group_of(0, 1) if rank < 2 else group_of(2, 3)
    for _ in range(10):
        step(group)
        step()


@healthy()
def a_group_that_one_rank_is_not_in(rank: int) -> None:
    group = group_of(0, 2) if rank != 1 else None
    for _ in range(10):
        if group is not None:
            step(group)
        step()


@healthy()
def messages_in_a_ring(rank: int) -> None:
    for _ in range(10):
        if rank == 0:
            disttrain.send(ones(4), 1)
            disttrain.recv(ones(4), 2)
        else:
            disttrain.recv(ones(4), rank - 1)
            disttrain.send(ones(4), (rank + 1) % 3)


@healthy()
def messages_without_waiting(rank: int) -> None:
    for _ in range(10):
        works = [disttrain.irecv(ones(4), (rank - 1) % 3), disttrain.isend(ones(4), (rank + 1) % 3)]
        for work in works:
            assert work is not None
            work.wait()


@healthy()
def many_collectives_under_way(_rank: int) -> None:
    for _ in range(5):
        works = [disttrain.all_reduce(ones(4), async_op=True) for _ in range(8)]
        for work in works:
            assert work is not None
            work.wait()


@healthy()
def branches_that_agree(rank: int) -> None:
    """The same calls from different lines."""
    for _ in range(10):
        if rank == 0:
            disttrain.all_reduce(ones(4))
        else:
            disttrain.all_reduce(0 * ones(4))


@healthy()
def last_rank_leaves_late(rank: int) -> None:
    train(20)
    if rank == 2:
        time.sleep(3)


@healthy()
def a_pause_that_all_make(_rank: int) -> None:
    train(10)
    time.sleep(4)
    train(10)


@healthy()
def a_rank_that_is_late_by_turns(rank: int) -> None:
    for number in range(12):
        if number % 3 == rank:
            time.sleep(0.2)
        step()


@healthy()
def one_long_save(rank: int) -> None:
    """Rank 0 takes a second once, the others wait for it."""
    train(10)
    if rank == 0:
        time.sleep(0.8)
    train(10)


@healthy()
def an_error_that_was_caught(rank: int) -> None:
    train(5)
    try:
        disttrain.broadcast(ones(4), 17)
    except DisttrainError:
        assert rank >= 0
    train(5)


@healthy()
def pipeline_of_three(rank: int) -> None:
    pipeline(rank, 3, num_steps=3)


@healthy()
def pipeline_without_a_bubble(rank: int) -> None:
    pipeline(rank, 3, name="ZB-H1", num_steps=2)


@healthy()
def sharded_layers(rank: int) -> None:
    sharded(rank, 6)


@healthy(num_ranks=4)
def mesh_of_four(_rank: int) -> None:
    meshed(10)


@healthy(is_signalled=True)
def signalled_while_it_trains(_rank: int) -> None:
    for _ in range(300):
        time.sleep(0.02)
        step()


@healthy(is_signalled=True)
def signalled_while_all_compute(_rank: int) -> None:
    train(5)
    end_s = time.monotonic() + 6
    while time.monotonic() < end_s:
        torch.ones(32, 32) @ torch.ones(32, 32)
    train(5)


@healthy(is_signalled=True)
def signalled_while_it_computes_beside_a_collective(_rank: int) -> None:
    """A collective is under way, and nobody waits for it yet."""
    for _ in range(4):
        work = disttrain.all_reduce(ones(4), async_op=True)
        time.sleep(1.5)
        assert work is not None
        work.wait()
