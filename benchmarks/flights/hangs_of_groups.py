"""Hangs of messages between ranks, and of meshes and other small groups."""

from __future__ import annotations

from collections.abc import Iterator

from flights.calls import NUM_RECORDS, Call, Calls, loop

from disttrain.flight_recorder.record.record import RECEIVE, SEND


def ring_of_sends(num_ranks: int) -> Iterator[Calls]:
    """Messages only: each sends to the next, and none receives."""
    ranks = tuple(range(num_ranks))
    for rank in range(num_ranks):
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        both: list[Call] = [("world", ranks, SEND, after, 1), ("world", ranks, RECEIVE, before, 2)]
        yield Calls(rank, [*both * (NUM_RECORDS // 2 - 1), both[0]])


def chain_of_pairs(num_ranks: int) -> Iterator[Calls]:
    """Each waits for the next one in a group of both, and nobody comes to the last of these groups."""
    calls = loop(num_ranks, NUM_RECORDS - 1)
    for rank in range(num_ranks):
        if rank + 1 == num_ranks:
            yield Calls("last", calls, waits=False)
        else:
            yield Calls(rank, [*calls, (f"pair {rank}", (rank, rank + 1), "all_reduce", None, 500)])


def half_absent_in_pairs(num_ranks: int) -> Iterator[Calls]:
    """Each other one waits in a group with its neighbour, which is at a line of its own."""
    calls = loop(num_ranks, NUM_RECORDS - 1)
    for rank in range(num_ranks):
        first = rank - rank % 2
        if rank % 2:
            yield Calls(rank, calls, waits=False, at=1000 + rank)
        else:
            yield Calls(rank, [*calls, (f"pair {first}", (first, first + 1), "all_reduce", None, 500)])


def _pipeline(num_ranks: int, rank: int) -> list[Call]:
    """Passes of a pipeline of all ranks: activations to the next, gradients to the one before."""
    ranks = tuple(range(num_ranks))
    step: list[Call] = []
    if rank:
        step.append(("world", ranks, RECEIVE, rank - 1, 10))
    if rank + 1 < num_ranks:
        step += [("world", ranks, SEND, rank + 1, 20), ("world", ranks, RECEIVE, rank + 1, 30)]
    if rank:
        step.append(("world", ranks, SEND, rank - 1, 40))
    return step


def missing_send(num_ranks: int) -> Iterator[Calls]:
    """A pipeline of all ranks, in the middle of which a stage goes on without having sent."""
    ranks = tuple(range(num_ranks))
    middle = num_ranks // 2
    for rank in range(num_ranks):
        step = _pipeline(num_ranks, rank)
        before = step * (NUM_RECORDS // len(step))
        if rank > middle:
            yield Calls(rank, [*before, step[0]])
        elif rank == middle:
            yield Calls(rank, [*before, step[0], ("world", ranks, "barrier", None, 70)])
        else:
            last: list[Call] = [("world", ranks, RECEIVE, rank + 1, 30)]
            yield Calls(rank, [*before, *step[: step.index(last[0])], *last])


def missing_receives(num_ranks: int) -> Iterator[Calls]:
    """Of pairs, one sends what the other does not receive, which has come to its script's end."""
    ranks = tuple(range(num_ranks))
    for rank in range(num_ranks):
        step: list[Call] = [("world", ranks, RECEIVE if rank % 2 else SEND, rank ^ 1, 10)]
        before = step * (NUM_RECORDS - 1)
        yield Calls(rank, before, waits=False) if rank % 2 else Calls(rank, [*before, *step])


def ring_of_receives(num_ranks: int) -> Iterator[Calls]:
    """Each receives from the one before, and then sends: all wait in a circle."""
    ranks = tuple(range(num_ranks))
    for rank in range(num_ranks):
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        both: list[Call] = [("world", ranks, SEND, after, 1), ("world", ranks, RECEIVE, before, 2)]
        yield Calls(rank, [*both * (NUM_RECORDS // 2 - 1), both[1]])


def mesh(num_ranks: int) -> Iterator[Calls]:
    """Groups of 8 for tensor parallelism, 8 stages, the rest for data; one rank is absent."""
    for rank in range(num_ranks):
        tensor, stage = rank % 8, rank // 8 % 8
        group = tuple(range(rank - tensor, rank - tensor + 8))
        data = tuple(range(rank % 64, num_ranks, 64))
        step: list[Call] = [(f"tp {rank // 8}", group, "all_reduce", None, 10 * line) for line in range(12)]
        if stage:
            step.append(("world", tuple(range(num_ranks)), RECEIVE, rank - 8, 200))
        if stage < 7:
            step.append(("world", tuple(range(num_ranks)), SEND, rank + 8, 210))
        step.append((f"dp {rank % 64}", data, "reduce_scatter_tensor", None, 300))
        calls = (step * (NUM_RECORDS // len(step) + 1))[:NUM_RECORDS]
        calls = [*calls[: NUM_RECORDS // len(step) * len(step)]]
        is_absent = rank == 5
        yield Calls(rank, calls[:-1] if is_absent else calls, waits=not is_absent)


def mesh_of_four(num_ranks: int) -> Iterator[Calls]:
    """Axes of 8, 2, 8 stages, and the rest for data, with a group of all; one is absent, and another has raised."""
    sizes = (8, 2, 8, num_ranks // 128)
    everybody = tuple(range(num_ranks))
    for rank in everybody:
        groups, stride = [], 1
        for size in sizes:
            first = rank - rank // stride % size * stride
            groups.append((first, tuple(range(first, first + size * stride, stride))))
            stride *= size
        (tp, tensor), (cp, context), (_, stages), (dp, data) = groups
        step: list[Call] = [(f"tp {tp}", tensor, "all_reduce", None, 10 * line) for line in range(8)]
        step += [(f"cp {cp}", context, "all_gather_into_tensor", None, 150)] * 2
        index = stages.index(rank)
        if index:
            step.append(("world", everybody, RECEIVE, stages[index - 1], 200))
        if index < 7:
            step.append(("world", everybody, SEND, stages[index + 1], 210))
        step += [(f"dp {dp}", data, "reduce_scatter_tensor", None, 300), ("world", everybody, "all_reduce", None, 310)]
        calls = step * (NUM_RECORDS // len(step))
        is_absent = rank in (5, num_ranks - 3)
        failure = "loss is no number" if rank == 5 else ""
        yield Calls(rank, calls[:-2] if is_absent else calls[:-1], waits=not is_absent, failure=failure)


def node_order(num_ranks: int) -> Iterator[Calls]:
    """A node is in a collective of all while the others wait along an axis."""
    everybody = tuple(range(num_ranks))
    for rank in everybody:
        row, column = divmod(rank, 8)
        tensor: Call = (f"tp {row}", everybody[rank - column : rank - column + 8], "all_reduce", None, 10)
        data: Call = (f"dp {column}", everybody[column::8], "reduce_scatter_tensor", None, 20)
        before = [tensor, tensor, tensor, data] * (NUM_RECORDS // 4 - 1)
        yield Calls(rank, [*before, tensor, ("world", everybody, "all_reduce", None, 30) if row == 1 else data])


def mesh_order(num_ranks: int) -> Iterator[Calls]:
    """A mesh of two axes: in one row half of the ranks takes the axes the other way round, in the next the others."""
    for rank in range(num_ranks):
        row, column = divmod(rank, 8)
        tensor: Call = (f"tp {row}", tuple(range(rank - column, rank - column + 8)), "all_reduce", None, 10)
        data: Call = (f"dp {column}", tuple(range(column, num_ranks, 8)), "all_reduce", None, 20)
        before = [tensor, tensor, tensor, data] * (NUM_RECORDS // 4 - 1)
        if row in (2, 3):
            yield Calls(rank, [*before, tensor if (row + column) % 2 else data])
        else:
            yield Calls(rank, [*before, tensor, data])


def subgroups(num_ranks: int) -> Iterator[Calls]:
    """Each rank is in a pair for each bit of its number, and in groups of 2, 4, 8 and so on; one is absent."""
    num_bits = num_ranks.bit_length() - 1
    for rank in range(num_ranks):
        step: list[Call] = []
        for bit in range(num_bits):
            other = rank ^ 1 << bit
            pair = (min(rank, other), max(rank, other))
            step.append((f"pair {bit} {pair[0]}", pair, "all_reduce", None, 10 * bit))
            first = rank >> bit + 1 << bit + 1
            step.append(
                (f"block {bit} {first}", tuple(range(first, first + (2 << bit))), "all_reduce", None, 500 + bit)
            )
        calls = [*(step * (NUM_RECORDS // len(step)))]
        is_absent = rank == 5
        yield Calls(rank, calls[: -len(step)] if is_absent else calls, waits=not is_absent)


def other_rows(num_ranks: int) -> Iterator[Calls]:
    """An exchange of uneven parts over groups of 64 as among experts, in each of which one rank expects too much."""
    for rank in range(num_ranks):
        index = rank % 64
        group = tuple(range(rank - index, rank - index + 64))
        calls = loop(num_ranks, NUM_RECORDS - 1)
        last: Call = (f"ep {rank // 64}", group, "all_to_all_single", None, 500)
        sent = tuple((index + other) % 7 for other in range(len(group)))
        received = tuple(rows + (index == 3 and other == 9) for other, rows in enumerate(sent))
        yield Calls(rank, [*calls, last], splits=(received, sent))


def all_overlapped(num_ranks: int) -> Iterator[Calls]:
    """A whole ring of asynchronous collectives and messages that nobody has waited for; one rank stays away."""
    yield from _all_overlapped(num_ranks, received_at=1)


def other_messages(num_ranks: int) -> Iterator[Calls]:
    """The same, and each message is received in a tensor of another size."""
    yield from _all_overlapped(num_ranks, received_at=2)


def _all_overlapped(num_ranks: int, received_at: int) -> Iterator[Calls]:
    ranks = tuple(range(num_ranks))
    for rank in range(num_ranks):
        step: list[Call] = [*loop(num_ranks, 2), ("world", ranks, SEND, (rank + 1) % num_ranks, 1)]
        step.append(("world", ranks, RECEIVE, (rank - 1) % num_ranks, received_at))
        calls = step * (NUM_RECORDS // len(step))
        yield Calls(rank, calls[:8], waits=False) if rank == 1 else Calls(rank, calls, num_open=len(calls))
