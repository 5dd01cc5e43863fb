"""Messages whose other end is missing, or waits itself."""

from __future__ import annotations

import time

import disttrain
from disttrain.flight_recorder.analysis.verdict import Cause, Kind
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.steps import group_of, step, train
from tests.flight_corpus.tensors import ones

CASES: Cases = []


@labelled(CASES, Kind.MISSING_SEND, 1)
def no_send(rank: int) -> None:
    train(5)
    if rank == 0:
        disttrain.recv(ones(4), 1)
    disttrain.barrier()


@labelled(CASES, Kind.MISSING_SEND, 2)
def no_send_until_the_end(rank: int) -> None:
    train(5)
    if rank == 0:
        disttrain.recv(ones(4), 2)


@labelled(CASES, Kind.MISSING_SEND, 1)
def one_send_too_few(rank: int) -> None:
    train(5)
    for number in range(4):
        if rank == 1 and number < 3:
            disttrain.send(ones(4), 0)
        elif rank == 0:
            disttrain.recv(ones(4), 1)
    disttrain.barrier()


@labelled(CASES, Kind.MISSING_RECEIVE, 1)
def no_receive(rank: int) -> None:
    train(5)
    if rank == 0:
        disttrain.send(ones(1 << 20), 1)
    disttrain.barrier()


@labelled(CASES, Kind.MISSING_RECEIVE, 0)
def no_receive_until_the_end(rank: int) -> None:
    train(5)
    if rank == 2:
        disttrain.send(ones(1 << 20), 0)


@labelled(CASES, Kind.CROSSED_SENDS, 0, 1, num_ranks=2)
def both_send_first(rank: int) -> None:
    train(5)
    disttrain.send(ones(1 << 20), 1 - rank)
    disttrain.recv(ones(1 << 20), 1 - rank)


@labelled(CASES, Kind.CROSSED_SENDS, 0, 1, 2)
def all_send_to_the_next(rank: int) -> None:
    train(5)
    disttrain.send(ones(1 << 20), (rank + 1) % 3)
    disttrain.recv(ones(1 << 20), (rank - 1) % 3)


@labelled(CASES, Kind.CROSSED_SENDS, 1, 2)
def two_of_three_send_first(rank: int) -> None:
    train(5)
    if rank:
        disttrain.send(ones(1 << 20), 3 - rank)
        disttrain.recv(ones(1 << 20), 3 - rank)
    disttrain.barrier()


@labelled(CASES, Kind.MISSING_SEND, 0, 1, num_ranks=2)
def both_receive_first(rank: int) -> None:
    train(5)
    disttrain.recv(ones(4), 1 - rank)
    disttrain.send(ones(4), 1 - rank)


@labelled(CASES, Kind.MISSING_SEND, 0)
def collective_before_the_send(rank: int) -> None:
    train(3)
    pair = group_of(0, 1) if rank < 2 else None
    if pair is not None:
        step(pair)
    if rank == 0:
        step(pair)
        disttrain.send(ones(4), 1)
    elif rank == 1:
        disttrain.recv(ones(4), 0)
        step(pair)
    disttrain.barrier()


@labelled(CASES, Kind.MISMATCHED_SIZES, 0, 1)
def message_of_another_size(rank: int) -> None:
    train(5)
    if rank == 0:
        disttrain.send(ones(8), 1)
    elif rank == 1:
        disttrain.recv(ones(4), 0)
    disttrain.barrier()


@labelled(CASES, Kind.RANK_ABSENT, 2, cause=Cause.IN_PYTHON, says="wait for ranks that wait")
def chain_of_receives(rank: int) -> None:
    """Rank 0 waits for 1, which waits for 2, which sleeps."""
    train(5)
    if rank == 2:
        time.sleep(1000)
    disttrain.recv(ones(4), rank + 1)
    if rank:
        disttrain.send(ones(4), rank - 1)
