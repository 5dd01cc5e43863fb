"""Collectives that contradict each other, and groups that do."""

from __future__ import annotations

import torch

import disttrain
from disttrain.flight_recorder.analysis.verdict import Kind
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.steps import group_of, step, train
from tests.flight_corpus.tensors import ones

CASES: Cases = []


@labelled(CASES, Kind.MISMATCHED_OPERATION, 1)
def branch_into_a_barrier(rank: int) -> None:
    train(5)
    if rank == 1:
        disttrain.barrier()
    else:
        step()
    train(3)


@labelled(CASES, Kind.MISMATCHED_OPERATION, 2)
def branch_into_a_broadcast(rank: int) -> None:
    train(5)
    if rank == 2:
        disttrain.broadcast(ones(4), 0)
    else:
        step()
    disttrain.barrier()


@labelled(CASES, Kind.MISMATCHED_OPERATION, 0)
def branch_on_the_first_rank(rank: int) -> None:
    train(5)
    if rank == 0:
        disttrain.all_gather_into_tensor(ones(12), ones(4))
    else:
        step()
    disttrain.barrier()


@labelled(CASES, Kind.MISMATCHED_SIZES, 1)
def uneven_batch(rank: int) -> None:
    train(5)
    step(size=7 if rank == 1 else 8)
    train(3)


@labelled(CASES, Kind.MISMATCHED_SIZES, 2)
def uneven_shard(rank: int) -> None:
    train(5)
    size = 3 if rank == 2 else 4
    disttrain.all_gather_into_tensor(ones(3 * size), ones(size))
    disttrain.barrier()


@labelled(CASES, Kind.MISMATCHED_SIZES, 0)
def uneven_broadcast(rank: int) -> None:
    train(5)
    disttrain.broadcast(ones(9 if rank == 0 else 8), 0)
    disttrain.barrier()


@labelled(CASES, Kind.MISMATCHED_DTYPE, 1)
def one_rank_in_double(rank: int) -> None:
    train(5)
    disttrain.all_reduce(ones(4, dtype=torch.float64 if rank == 1 else torch.float32))
    train(3)


@labelled(CASES, Kind.MISMATCHED_DTYPE, 2)
def one_rank_in_integers(rank: int) -> None:
    """As many bytes: nothing hangs, the sums are wrong."""
    train(5)
    disttrain.all_reduce(ones(4).to(torch.int32 if rank == 2 else torch.float32))
    train(3)


@labelled(CASES, Kind.MISMATCHED_ROOT, 2)
def another_root_of_a_broadcast(rank: int) -> None:
    train(5)
    disttrain.broadcast(ones(4), 1 if rank == 2 else 0)
    train(3)


@labelled(CASES, Kind.MISMATCHED_ROOT, 1)
def another_root_of_a_reduce(rank: int) -> None:
    train(5)
    disttrain.reduce(ones(4), 1 if rank == 1 else 0)
    disttrain.barrier()


@labelled(CASES, Kind.WRONG_ORDER, 1)
def two_sizes_at_once_in_another_order(rank: int) -> None:
    train(5)
    sizes = (16, 8) if rank == 1 else (8, 16)
    for work in [disttrain.all_reduce(ones(size), async_op=True) for size in sizes]:
        assert work is not None
        work.wait()
    disttrain.barrier()


@labelled(CASES, Kind.WRONG_ORDER, 2)
def two_roots_at_once_in_another_order(rank: int) -> None:
    train(5)
    roots = (1, 0) if rank == 2 else (0, 1)
    for work in [disttrain.broadcast(ones(4), root, async_op=True) for root in roots]:
        assert work is not None
        work.wait()
    disttrain.barrier()


# Who hangs in the first of the calls has left no trace of the second: this cannot be told from a call that is wrong.
@labelled(CASES, Kind.WRONG_ORDER, 1, also=(Kind.MISMATCHED_SIZES,))
def two_sizes_in_another_order(rank: int) -> None:
    train(5)
    for size in (16, 8) if rank == 1 else (8, 16):
        step(size=size)
    disttrain.barrier()


@labelled(CASES, Kind.WRONG_ORDER, 2, also=(Kind.MISMATCHED_OPERATION,))
def two_operations_in_another_order(rank: int) -> None:
    train(5)
    calls = [disttrain.barrier, step]
    for call in reversed(calls) if rank == 2 else calls:
        call()
    disttrain.barrier()


@labelled(CASES, Kind.WRONG_ORDER, 0, 1, num_ranks=2)
def two_groups_in_another_order(rank: int) -> None:
    groups = [group_of(0, 1), group_of(0, 1)]
    for group in groups:
        step(group)
    for group in groups if rank else reversed(groups):
        step(group)


@labelled(CASES, Kind.WRONG_ORDER, 2)
def world_before_group(rank: int) -> None:
    pair = group_of(0, 1, 2)
    train(3)
    step(pair)
    if rank == 2:
        step()
        step(pair)
    else:
        step(pair)
        step()


@labelled(CASES, Kind.WRONG_ORDER, 0, 1, num_ranks=2)
def first_use_of_two_groups_in_another_order(rank: int) -> None:
    groups = [group_of(0, 1), group_of(0, 1)]
    train(3)
    for group in groups if rank else reversed(groups):
        step(group)


def _circle(rank: int, num_ranks: int) -> None:
    """Each rank is in a group with the one before and one with the one after, and goes to the latter first."""
    groups = {}
    for first in range(num_ranks):
        pair = (first, (first + 1) % num_ranks)
        if rank in pair:
            groups[first] = group_of(*pair)
    for first in sorted(groups):
        step(groups[first])
    step(groups[rank])
    step(groups[(rank - 1) % num_ranks])


@labelled(CASES, Kind.WAIT_CYCLE, 0, 1, 2)
def circle_over_three_groups(rank: int) -> None:
    _circle(rank, 3)


@labelled(CASES, Kind.WAIT_CYCLE, 0, 1, 2, 3, num_ranks=4)
def circle_over_four_groups(rank: int) -> None:
    _circle(rank, 4)


@labelled(CASES, Kind.DIFFERENT_GROUPS, 1, says="has not made that group")
def other_members(rank: int) -> None:
    """Ranks 0 and 1 wait for each other, but rank 1 is alone with its view."""
    train(3)
    group = group_of(0, 1) if rank == 1 else group_of(0, 1, 2)
    step(group)


@labelled(CASES, Kind.DIFFERENT_GROUPS, 1, says="of the same ranks it has made")
def group_made_once_less(rank: int) -> None:
    train(3)
    group = group_of(0, 1, 2)
    if rank != 1:
        group = group_of(0, 1, 2)
    step(group)


@labelled(CASES, Kind.DIFFERENT_GROUPS, 2)
def group_not_made(rank: int) -> None:
    train(3)
    if rank != 2:
        step(group_of(0, 1, 2))
    step()
