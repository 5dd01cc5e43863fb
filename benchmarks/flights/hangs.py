"""Hangs of many ranks, as what each rank has called: the kinds that the analyzer tells apart, and those that a job's
end makes of its files. A case yields the calls of one rank after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flights.calls import NUM_RECORDS, Call, Calls, loop
from flights.hangs_of_groups import (
    all_overlapped,
    chain_of_pairs,
    half_absent_in_pairs,
    mesh,
    mesh_of_four,
    mesh_order,
    missing_receives,
    missing_send,
    node_order,
    other_messages,
    other_rows,
    ring_of_receives,
    ring_of_sends,
    subgroups,
)


def one_absent(num_ranks: int) -> Iterator[Calls]:
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls("absent", calls[:-1], waits=False) if rank == 1 else Calls("", calls)


def half_absent(num_ranks: int) -> Iterator[Calls]:
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls("absent", calls[:-1], waits=False) if rank % 2 else Calls("", calls)


def half_raised(num_ranks: int) -> Iterator[Calls]:
    """Each with words of its own."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        if rank % 2:
            yield Calls(rank, calls[:-1], waits=False, failure=f"batch {rank} has no tokens")
        else:
            yield Calls("", calls)


def other_operation(num_ranks: int) -> Iterator[Calls]:
    calls = loop(num_ranks)
    *before, (name, ranks, _, peer, line) = calls
    for rank in range(num_ranks):
        yield Calls("odd", [*before, (name, ranks, "barrier", peer, line)]) if rank == 1 else Calls("", calls)


def other_order(num_ranks: int) -> Iterator[Calls]:
    """Half of the ranks take two groups the other way round."""
    ranks = tuple(range(num_ranks))
    calls = loop(num_ranks, NUM_RECORDS - 2)
    first, second = ("a", ranks, "all_reduce", None, 1), ("b", ranks, "all_reduce", None, 2)
    for rank in range(num_ranks):
        yield Calls(rank % 2, [*calls, second if rank % 2 else first])


def no_dump(num_ranks: int) -> Iterator[Calls]:
    """A quarter of the dumps is missing."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls("", calls, is_gone=rank % 4 == 3)


def ahead(num_ranks: int) -> Iterator[Calls]:
    """Rings reach back to different times; one rank has left most of the calls out."""
    ranks = tuple(range(num_ranks))
    for rank in range(num_ranks):
        calls = loop(num_ranks, 300 if rank == 7 else NUM_RECORDS)
        more = [("world", ranks, "broadcast", 0, 3)] * (rank % 64)
        yield Calls((rank == 7, rank % 64), [*more, *calls][:NUM_RECORDS])


def other_lines(num_ranks: int) -> Iterator[Calls]:
    """Rank 0 calls everything from lines of its own, and one is absent."""
    calls = loop(num_ranks)
    own = [(*call[:4], call[4] + 400 * (number % 2)) for number, call in enumerate(calls)]
    for rank in range(num_ranks):
        yield Calls("absent", calls[:-1], waits=False) if rank == 1 else Calls(rank == 0, calls if rank else own)


def first_call(num_ranks: int) -> Iterator[Calls]:
    """Half of the ranks does not come to a group's first collective, for which the others connect."""
    calls = loop(num_ranks)
    late = {"late": tuple(range(num_ranks))}
    for rank in range(num_ranks):
        is_absent = rank % 2 == 1
        connecting = "" if is_absent else "all_reduce"
        yield Calls(is_absent, calls, waits=False, connecting=connecting, groups=late)


def devices(num_ranks: int) -> Iterator[Calls]:
    """With marks of the devices; half of these have not come."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls(rank % 2, calls[:-1] if rank % 2 else calls, waits=rank % 2 == 0, has_marks=True)


def no_hang(num_ranks: int) -> Iterator[Calls]:
    calls = loop(num_ranks)
    for _ in range(num_ranks):
        yield Calls("", calls, waits=False)


def other_sizes(num_ranks: int) -> Iterator[Calls]:
    """A quarter of the ranks has a batch that is too long."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls(rank % 4 == 1, calls, rows=16 if rank % 4 == 1 else 8)


def rows_of_all(num_ranks: int) -> Iterator[Calls]:
    """The same in one group of all ranks: each has as many numbers as there are ranks."""
    ranks = tuple(range(num_ranks))
    calls = loop(num_ranks, NUM_RECORDS - 1)
    last: Call = ("world", ranks, "all_to_all_single", None, 500)
    for rank in ranks:
        sent = tuple((rank + other) % 7 for other in ranks)
        received = tuple(rows + (rank == 3 and other == 9) for other, rows in enumerate(sent))
        yield Calls(rank, [*calls, last], splits=(received, sent))


def overlapped(num_ranks: int) -> Iterator[Calls]:
    """Each has 64 asynchronous collectives under way when half of the ranks stay away."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        if rank % 2:
            yield Calls("absent", calls[:-64], waits=False)
        else:
            yield Calls("", calls, num_open=64)


def no_end(num_ranks: int) -> Iterator[Calls]:
    """All have come, and it does not end: the network."""
    calls = loop(num_ranks)
    for _ in range(num_ranks):
        yield Calls("", calls)


def broken(num_ranks: int) -> Iterator[Calls]:
    """A node has gone; the others' connections broke."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls("", calls, is_gone=rank // 8 == 1, waits=False, error="Connection closed by peer [10.0.0.1]:4711")


def other_members(num_ranks: int) -> Iterator[Calls]:
    """Each rank makes a group without its neighbour."""
    calls = loop(num_ranks, NUM_RECORDS - 1)
    for rank in range(num_ranks):
        members = tuple(other for other in range(num_ranks) if other != rank ^ 1)
        yield Calls(rank, [*calls, ("own", members, "all_reduce", None, 500)])


def other_names(num_ranks: int) -> Iterator[Calls]:
    """Half of the ranks connects to the others in a group that these have under another name."""
    calls = loop(num_ranks)
    ranks = tuple(range(num_ranks))
    for rank in range(num_ranks):
        yield Calls(rank % 2, calls, waits=False, connecting="all_reduce", groups={f"late {rank % 2}": ranks})


def other_roots(num_ranks: int) -> Iterator[Calls]:
    """Each rank takes itself for the root."""
    calls = loop(num_ranks, NUM_RECORDS - 1)
    for rank in range(num_ranks):
        yield Calls(rank, [*calls, ("group 0", tuple(range(num_ranks)), "broadcast", rank, 500)])


def straggler(num_ranks: int) -> Iterator[Calls]:
    """Nothing hangs: one rank works while all others wait."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls(rank == 7, calls, waits=False, works_s=0.0099 if rank == 7 else 0.002)


def cut_dumps(num_ranks: int) -> Iterator[Calls]:
    """Half absent, and every dump is cut off before its end."""
    for calls in half_absent(num_ranks):
        yield replace(calls, form="cut")


def rings(num_ranks: int) -> Iterator[Calls]:
    """Half absent, and all were killed before they made a dump."""
    for calls in half_absent(num_ranks):
        yield replace(calls, form="ring")


def mesh_of_rings(num_ranks: int) -> Iterator[Calls]:
    for calls in mesh(num_ranks):
        yield replace(calls, form="ring")


def half_killed(num_ranks: int) -> Iterator[Calls]:
    """Of half of the ranks only rings are left."""
    for rank, calls in enumerate(half_absent(num_ranks)):
        yield replace(calls, form="ring" if rank % 2 else "dump")


CASES: dict[str, Callable[[int], Iterator[Calls]]] = {
    "one absent": one_absent,
    "half absent": half_absent,
    "half raised": half_raised,
    "another operation": other_operation,
    "another order": other_order,
    "a quarter without dumps": no_dump,
    "a rank behind by many": ahead,
    "lines that differ": other_lines,
    "half not at the first call": first_call,
    "a ring of sends": ring_of_sends,
    "a mesh": mesh,
    "a mesh of four axes": mesh_of_four,
    "a node in another order": node_order,
    "devices": devices,
    "no hang": no_hang,
    "sizes that differ": other_sizes,
    "rows among experts": other_rows,
    "rows among all": rows_of_all,
    "axes in another order": mesh_order,
    "many subgroups": subgroups,
    "a chain of pairs": chain_of_pairs,
    "half absent in pairs": half_absent_in_pairs,
    "a pipeline without a send": missing_send,
    "sends without receives": missing_receives,
    "a ring of receives": ring_of_receives,
    "overlapped": overlapped,
    "nothing waited for": all_overlapped,
    "messages of other sizes": other_messages,
    "no end": no_end,
    "broken connections": broken,
    "other members": other_members,
    "other names": other_names,
    "roots that differ": other_roots,
    "a straggler": straggler,
    "dumps that are cut": cut_dumps,
    "rings alone": rings,
    "rings of a mesh": mesh_of_rings,
    "half of them rings": half_killed,
}
