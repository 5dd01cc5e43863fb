"""How `disttrain-flight` grows with the ranks whose dumps it reads, for hangs of several kinds.

    python benchmarks/scale/dumps.py [--quick] [--ranks 1024 4096] [--cases NAME...] [--json FILE]

Without `--ranks` some kinds are taken; with it all, or those of `--cases`. Most of the time goes into making the dumps.
The command runs as users run it, in a process of its own; time is the processor's, memory its peak. torch's
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
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))
from flights.calls import NUM_RECORDS
from flights.hangs import CASES
from flights.rings import header, ring_parts, ring_slots
from harness import OURS, TORCH, Row, command_line, finish, row

from disttrain.flight_recorder.dumps.dump import MAGIC, dump_name, encode, packed
from disttrain.flight_recorder.dumps.words import rank_name
from disttrain.flight_recorder.record.record import Record, State
from disttrain.flight_recorder.record.ring.layout import SUFFIX as RING_SUFFIX

SIZES, QUICK_SIZES = (1024, 4096), (32,)
SOME_CASES = ("one absent", "half absent")
"""Of which 4,096 dumps are made in seconds, since most of them are alike."""
OWN_SIZES, OWN_CASES = (256, 1024), ("a mesh",)
"""Each rank has a dump like no other's."""
TORCH_CASES = ("one absent", "half absent")
TORCH_SIZES, QUICK_TORCH_SIZES = (32, 64), (16,)
"""torch's analyzer takes minutes for more."""
QUICK_CASES = (*TORCH_CASES, "a mesh", "rings alone")
_MAX_KEPT = 64


def write_all(folder: Path, num_ranks: int, case: str) -> None:
    """The files of a hang. Records of one pattern are encoded once; what names groups, peers and ranks is each file's
    own."""
    records: dict[object, list[bytes]] = {}
    for rank, calls in enumerate(CASES[case](num_ranks)):
        if calls.is_gone:
            continue
        pattern = calls.pattern
        is_new = pattern not in records
        if is_new and len(records) == _MAX_KEPT:
            records.clear()
        outline = replace(calls.outline(num_ranks), rank=rank, pid=rank, host=f"node{rank // 8}")
        if calls.form == "ring":
            if is_new:
                records[pattern] = [ring_slots(calls.dump(num_ranks))]
            before, after = ring_parts(outline, *records[pattern])
            (folder / f"{rank_name(rank, outline.job)}{RING_SUFFIX}").write_bytes(before + header(outline) + after)
            continue
        if is_new:
            records[pattern] = _pieces(encode(calls.dump(num_ranks)))[1]
        between = itertools.chain(records[pattern], itertools.repeat(b""))
        content = MAGIC + b"".join(itertools.chain(*zip(_pieces(encode(outline))[0], between, strict=False)))
        if calls.form == "cut":
            content = content[:-1000]
        else:
            content += packed(["end", zlib.crc32(content)])
        (folder / dump_name(outline)).write_bytes(content)


def _pieces(data: bytes) -> tuple[list[bytes], list[bytes]]:
    """All items of a dump but its records; and after each of these the records that follow, perhaps none."""
    unpacker = msgpack.Unpacker(io.BytesIO(data[len(MAGIC) :]))
    others, records, start = [], [], len(MAGIC)
    for kind, *_ in unpacker:
        stop = len(MAGIC) + unpacker.tell()
        if kind == "record":
            records[-1] += data[start:stop]
        elif kind != "end":
            others.append(data[start:stop])
            records.append(b"")
        start = stop
    return others, records


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
    """Seconds of the processor that the command takes, and the bytes that it has at most."""
    ours = ["-m", "disttrain.flight_recorder.cli", str(folder), "--json"]
    theirs = ["-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "--prefix", "nccl_trace_rank_"]
    command = [sys.executable, *(ours if side == OURS else theirs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert side == TORCH or process.returncode not in (1, 2), process.returncode
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def rows(quick: bool) -> list[Row]:
    """Two rows for each kind of hang and size: seconds and memory."""
    found = _rows(QUICK_TORCH_SIZES if quick else TORCH_SIZES, TORCH_CASES, (OURS, TORCH))
    if quick:
        return found + _rows(QUICK_SIZES, QUICK_CASES, (OURS,))
    return found + _rows(SIZES, SOME_CASES, (OURS,)) + _rows(OWN_SIZES, OWN_CASES, (OURS,))


def _rows(sizes: Sequence[int], cases: Iterable[str], sides: Sequence[str]) -> list[Row]:
    found = []
    for case, num_ranks in itertools.product(cases, sizes):
        taken = {}
        for side in sides:
            with tempfile.TemporaryDirectory() as folder:
                (write_all if side == OURS else write_torch)(Path(folder), num_ranks, case)
                taken[side] = run(side, Path(folder))
        name = f"{case}, {num_ranks} ranks x {NUM_RECORDS} records"
        found.append(row(name, "s", {side: [used_s] for side, (used_s, _) in taken.items()}))
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
