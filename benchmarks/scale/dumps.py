"""How `disttrain-flight` grows with the ranks whose dumps it reads, for hangs of several kinds.

    python benchmarks/scale/dumps.py [--quick] [--ranks 1024 4096] [--cases NAME...] [--json FILE]

The command runs as users run it, in a process of its own; time is from its start to its end, memory its peak. torch's
side is its own analyzer, on the same calls in torch's own dumps, where these can say it.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import OURS, TORCH, Row, command_line, finish, row

from disttrain.flight_recorder.dumps.dump import MAGIC, Dump, dump_name, encode, packed
from disttrain.flight_recorder.record.record import (
    RECEIVE,
    SEND,
    CallSite,
    ChannelProgress,
    DeviceTimes,
    Failure,
    Frame,
    GroupProgress,
    Record,
    State,
    ThreadStack,
)

NUM_RECORDS = 2000
NUM_FRAMES = 8
NOW_S = 1_700_000_000.0
SIZES, QUICK_SIZES = (1024, 2048, 4096), (64, 128)
TORCH_CASES = ("one absent", "half absent")
TORCH_SIZES, QUICK_TORCH_SIZES = (32, 64, 128), (16,)
"""torch's analyzer takes minutes for more."""
_MAX_KEPT = 64
INSIDE = Frame("/site/disttrain/process_group/door.py", 66, "issue")
Call = tuple[str, tuple[int, ...], str, int | None, int]
"""Group name, its ranks, operation, the peer's rank, and a line."""


@dataclass
class Calls:
    """What one rank called. `like`: ranks with an equal one have dumps that differ in their heads only."""

    like: object
    calls: list[Call]
    waits: bool = True
    is_gone: bool = False
    failure: str = ""
    connecting: str = ""
    has_marks: bool = False
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def dump(self, num_ranks: int) -> Dump:
        """The dump, but for what says which rank it is."""
        sites: dict[Call, CallSite] = {}
        last: dict[tuple[str, str, int | None], int] = {}
        groups = dict(self.groups)
        records = []
        for number, call in enumerate(self.calls):
            name, ranks, operation, peer, line = call
            is_message = operation in (SEND, RECEIVE)
            key = (name, operation, peer) if is_message else (name, "", None)
            last[key] = last.get(key, 0) + 1
            groups[name] = ranks
            if call not in sites:
                stack = tuple(Frame("/job/model.py", line + depth, f"layer_{depth}") for depth in range(NUM_FRAMES))
                shapes = ((8, line),)
                sites[call] = CallSite(name, ranks, operation, shapes, shapes, ("bfloat16",), peer, stack)
            began_s = NOW_S - (len(self.calls) - number) * 0.01 - 20
            device = DeviceTimes(began_s + 0.001, began_s + 0.004, None) if self.has_marks else None
            records.append(Record(sites[call], last[key], State.COMPLETED, began_s, began_s + 0.005, device=device))
        if self.waits and records:
            device = DeviceTimes(NOW_S - 20) if self.has_marks else None
            records[-1] = records[-1]._replace(state=State.ENQUEUED, completed_s=None, device=device)
        is_inside = self.waits or self.connecting
        frame = Frame("/job/model.py", 1, "layer")
        return Dump(
            rank=0,
            world_size=num_ranks,
            job="job",
            host="",
            pid=0,
            started_s=NOW_S - 100,
            dumped_s=NOW_S,
            reason="exception" if self.failure else "rank 0 has waited for 20 s",
            versions={},
            package="/site/disttrain/",
            libraries=("/site/",),
            failure=Failure("ValueError", self.failure, (frame,)) if self.failure else None,
            groups=tuple(
                GroupProgress(
                    name,
                    ranks,
                    last.get((name, "", None), 0),
                    "",
                    self.connecting if (name, "", None) not in last else "",
                )
                for name, ranks in groups.items()
            ),
            channels=tuple(ChannelProgress(*key[:2], key[2] or 0, number) for key, number in last.items() if key[1]),
            threads=(ThreadStack("MainThread", True, (INSIDE, frame) if is_inside else (frame,)),),
            records=tuple(records),
        )


def loop(num_ranks: int, num_records: int = NUM_RECORDS) -> list[Call]:
    """A full ring of one rank: a loop over 40 call sites, in three groups of all."""
    ranks = tuple(range(num_ranks))
    operations = ("all_gather_into_tensor", "all_reduce")
    sites = [(f"group {line % 3}", ranks, operations[line % 2], None, 10 * line) for line in range(40)]
    return [sites[number % 40] for number in range(num_records)]


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


def ring_of_sends(num_ranks: int) -> Iterator[Calls]:
    """Messages only: each sends to the next, and none receives."""
    ranks = tuple(range(num_ranks))
    for rank in range(num_ranks):
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        both: list[Call] = [("world", ranks, SEND, after, 1), ("world", ranks, RECEIVE, before, 2)]
        yield Calls(rank, [*both * (NUM_RECORDS // 2 - 1), both[0]])


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


def devices(num_ranks: int) -> Iterator[Calls]:
    """With marks of the devices; half of these have not come."""
    calls = loop(num_ranks)
    for rank in range(num_ranks):
        yield Calls(rank % 2, calls[:-1] if rank % 2 else calls, waits=rank % 2 == 0, has_marks=True)


def no_hang(num_ranks: int) -> Iterator[Calls]:
    calls = loop(num_ranks)
    for _ in range(num_ranks):
        yield Calls("", calls, waits=False)


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
    "devices": devices,
    "no hang": no_hang,
}


def write_all(folder: Path, num_ranks: int, case: str) -> None:
    """The dumps of a hang. Those that are alike are encoded once: what says which rank it is stands in their heads."""
    rest: dict[object, tuple[Dump, bytes]] = {}
    for rank, calls in enumerate(CASES[case](num_ranks)):
        if calls.is_gone:
            continue
        if calls.like not in rest:
            if len(rest) == _MAX_KEPT:
                rest.clear()
            like = calls.dump(num_ranks)
            rest[calls.like] = (like, _without_head(encode(like)))
        like, body = rest[calls.like]
        named = replace(like, rank=rank, pid=rank, host=f"node{rank // 8}")
        dump = replace(named, records=(), groups=(), channels=(), threads=(), failure=None)
        head = encode(dump)
        content = head[: len(head) - len(_end(head))] + body
        (folder / dump_name(dump)).write_bytes(content + packed(["end", zlib.crc32(content)]))


def _end(data: bytes) -> bytes:
    return packed([*msgpack.Unpacker(io.BytesIO(data[len(MAGIC) :]))][-1])


def _without_head(data: bytes) -> bytes:
    unpacker = msgpack.Unpacker(io.BytesIO(data[len(MAGIC) :]))
    unpacker.skip()
    first = len(MAGIC) + unpacker.tell()
    return data[first : data.rindex(packed("end")) - 1]


def write_torch(folder: Path, num_ranks: int, case: str) -> None:
    """The same calls as torch's NCCL process groups dump them."""
    entries: dict[object, list[dict[str, Any]]] = {}
    for rank, calls in enumerate(CASES[case](num_ranks)):
        if calls.like not in entries:
            dump = calls.dump(num_ranks)
            entries[calls.like] = [_torch_entry(number, record) for number, record in enumerate(dump.records)]
        groups = {call[0]: call[1] for call in calls.calls}
        content = {
            "version": "2.10",
            "entries": entries[calls.like],
            "pg_config": {
                name: {"name": name, "desc": name, "ranks": str(list(ranks))} for name, ranks in groups.items()
            },
            "pg_status": {},
        }
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))


def _torch_entry(number: int, record: Record) -> dict[str, Any]:
    site, is_over = record.site, record.state is State.COMPLETED
    began_ns = int(record.enqueued_s * 1e9)
    sizes = [list(shape) for shape in site.input_shapes]
    names = {"all_gather_into_tensor": "_all_gather_base"}
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (site.group_name, site.group_name),
        "collective_seq_id": record.sequence,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{names.get(site.operation, site.operation)}",
        "time_created_ns": began_ns,
        "time_discovered_started_ns": began_ns,
        "time_discovered_completed_ns": began_ns + 5_000_000 if is_over else None,
        "input_sizes": sizes,
        "input_dtypes": ["BFloat16"],
        "output_sizes": sizes,
        "output_dtypes": ["BFloat16"],
        "state": "completed" if is_over else "started",
        "retired": is_over,
        "is_p2p": False,
        "timeout_ms": 600_000,
        "frames": [{"name": frame.function, "filename": frame.file, "line": frame.line} for frame in site.stack],
    }


def run(side: str, folder: Path) -> tuple[float, float]:
    """Seconds from start to end of the command, and the bytes that it has at most."""
    ours = ["-m", "disttrain.flight_recorder.cli", str(folder), "--json"]
    theirs = ["-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "--prefix", "nccl_trace_rank_"]
    start_s = time.perf_counter()
    command = [sys.executable, *(ours if side == OURS else theirs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start_s
    process.returncode = os.waitstatus_to_exitcode(status)
    assert side == TORCH or process.returncode not in (1, 2), process.returncode
    return wall_s, usage.ru_maxrss * 1024


def rows(quick: bool) -> list[Row]:
    """Two rows for each kind of hang and size: seconds and memory."""
    found = _rows(QUICK_TORCH_SIZES if quick else TORCH_SIZES, TORCH_CASES, (OURS, TORCH))
    return found + _rows(QUICK_SIZES if quick else SIZES, CASES, (OURS,))


def _rows(sizes: Sequence[int], cases: Iterable[str], sides: Sequence[str]) -> list[Row]:
    found = []
    for case, num_ranks in itertools.product(cases, sizes):
        taken = {}
        for side in sides:
            with tempfile.TemporaryDirectory() as folder:
                (write_all if side == OURS else write_torch)(Path(folder), num_ranks, case)
                taken[side] = run(side, Path(folder))
        name = f"{case}, {num_ranks} ranks x {NUM_RECORDS} records"
        found.append(row(name, "s", {side: [wall_s] for side, (wall_s, _) in taken.items()}))
        found.append(row(name, "MiB at most", {side: [peak] for side, (_, peak) in taken.items()}, 2**-20))
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="small worlds")
    parser.add_argument("--ranks", type=int, nargs="+", help="these worlds, and no torch")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    options = parser.parse_args()
    finish(_rows(options.ranks, options.cases, (OURS,)) if options.ranks else rows(options.quick), options.json)


if __name__ == "__main__":
    main()
