"""Growth of checkpoints with the number of ranks: plans, manifests, verifying; nothing is trained, and no rank runs.

    python benchmarks/scale/checkpoints.py [--quick]

States are outlines: tensors of nine shapes, as a transformer's block has, cut over all ranks. "plan" is the time of one
rank, "commit" that of rank 0 from what all ranks have told it, "open" that of a rank that reads the manifest and plans
what it loads, which is its own part of the save. torch's sides are its default planners: of the coordinator, which
removes what is there twice and makes the metadata, and of one other rank; its metadata are a pickle that each rank
reads.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import OURS, TORCH, Row, command_line, finish, in_turns, row
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from disttrain._python.garbage import uncollected
from disttrain.checkpoint import LocalStorage, save
from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.image import Written
from disttrain.checkpoint.format.manifest import MANIFEST, TABLES, Chunk, SavedFile, file_name
from disttrain.checkpoint.format.reading import read_manifest
from disttrain.checkpoint.format.verifying import find_damage
from disttrain.checkpoint.layout import TensorSpec
from disttrain.checkpoint.outline import Outline
from disttrain.checkpoint.plan import plan_load, plan_save
from disttrain.checkpoint.saving.commit import Contents, files_about

COLUMNS = 16
MIB = 1 << 20


def outline(num_tensors: int, num_ranks: int, num_replicas: int = 1) -> Outline:
    """Nine shapes; rows cut among all ranks, or among groups of them that have the same."""
    mesh = (num_replicas, num_ranks // num_replicas) if num_replicas > 1 else (num_ranks,)
    cuts = (None, 0) if num_replicas > 1 else (0,)
    return Outline(
        {
            f"layers.{number // 9}.{number % 9}": TensorSpec(
                (2 * num_ranks + number % 9, COLUMNS), "float32", range(num_ranks), mesh, cuts
            )
            for number in range(num_tensors)
        }
    )


def seconds(call: Callable[[], object]) -> float:
    with uncollected():
        start_s = time.process_time()
        call()
        return time.process_time() - start_s


def peak_mib(call: Callable[[], object]) -> float:
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / MIB


@contextmanager
def committed(num_tensors: int, num_ranks: int) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A folder with all of a save but its data, and how rank 0 has made that from what all ranks have told it."""
    state = outline(num_tensors, num_ranks)
    plans = plan_save([state] * num_ranks)
    rows = [reported(plans[rank].parts, rank) for rank in range(num_ranks)]
    tensors = {name: (spec.shape, spec.dtype) for name, spec in state.tensors.items()}
    contents = Contents("a benchmark", tensors, {}, {}, plans.spreads())
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in files_about("0" * 32, contents, rows).items():
            (Path(folder) / name).write_bytes(b"".join(parts))
        yield Path(folder), lambda: files_about("0" * 32, contents, rows)


def reported(parts: list[tuple[str, Box]], rank: int) -> list[object]:
    """A rank's words to rank 0."""
    written, offset = Written(), 4096
    for number, (name, box) in enumerate(parts):
        num_bytes = 4 * box.num_elements
        checksum = hash((rank, number)).to_bytes(8, "little", signed=True)
        written.rows.append((name, Chunk(file_name(rank), offset, num_bytes, box, checksum)))
        offset += num_bytes
    return replace(written, file=SavedFile(offset, 4096, bytes(8))).to_plain()


def opened(folder: Path, num_tensors: int, num_ranks: int) -> None:
    """A rank's way to the reads of its own part."""
    manifest = read_manifest(LocalStorage(), folder)
    plan = plan_save([outline(num_tensors, num_ranks)] * num_ranks)[num_ranks // 2]
    plan_load(manifest, {name: [box] for name, box in plan.parts})


def torch_plans(num_tensors: int, num_ranks: int) -> list[SavePlan]:
    """The local plans of all ranks, as torch's planner makes them of DTensors cut in rows."""
    specs = outline(num_tensors, num_ranks)
    plans = plan_save([specs] * num_ranks)
    return [SavePlan([torch_item(specs, name, box) for name, box in plans[rank].parts]) for rank in range(num_ranks)]


def torch_item(specs: Outline, name: str, box: Box) -> WriteItem:
    offsets, sizes = torch.Size(box.origin), torch.Size(box.shape)
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size(specs.tensors[name].shape)
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def torch_metadata(plans: list[SavePlan]) -> bytes:
    """The file that each rank reads, without where the bytes are."""
    by_name: dict[str, list[WriteItem]] = {}
    for plan in plans:
        for item in plan.items:
            by_name.setdefault(item.index.fqn, []).append(item)
    entries = {
        name: TensorStorageMetadata(
            items[0].tensor_data.properties, items[0].tensor_data.size, [item.tensor_data.chunk for item in items]
        )
        for name, items in by_name.items()
    }
    storage = {item.index: (f"__{rank}_0.distcp", 0, 0) for rank, plan in enumerate(plans) for item in plan.items}
    return pickle.dumps(Metadata(entries, storage_data=storage))


def torch_opened(pickled: bytes) -> None:
    pickle.loads(pickled)  # noqa: S301  our own


def plan_rows(num_tensors: int, sizes: list[int], torch_sizes: list[int], num_rounds: int) -> Iterator[Row]:
    for num_ranks in sizes:
        outlines = [outline(num_tensors, num_ranks)] * num_ranks
        replicated = [outline(num_tensors, num_ranks, 8)] * num_ranks
        calls = {OURS: lambda outlines=outlines: seconds(lambda: plan_save(outlines)[len(outlines) // 2])}
        if num_ranks in torch_sizes:
            local = torch_plans(num_tensors, num_ranks)
            calls[TORCH] = lambda local=local: seconds(lambda: create_default_global_save_plan(local))
        name = f"{num_tensors} tensors on {num_ranks} ranks"
        yield row(f"plan of a save, {name}", "ms", in_turns(calls, num_rounds), 1e3)
        call = {OURS: lambda outlines=replicated: seconds(lambda: plan_save(outlines)[len(outlines) // 2])}
        yield row(f"plan of a save, {name}, 8 replicas", "ms", in_turns(call, num_rounds), 1e3)


def manifest_rows(num_tensors: int, sizes: list[int], torch_sizes: list[int], num_rounds: int) -> Iterator[Row]:
    for num_ranks in sizes:
        name = f"{num_tensors} tensors on {num_ranks} ranks"
        with committed(num_tensors, num_ranks) as (folder, again):
            sides = {OURS: lambda folder=folder, n=num_ranks: seconds(lambda: opened(folder, num_tensors, n))}
            peaks = {OURS: [peak_mib(lambda folder=folder, n=num_ranks: opened(folder, num_tensors, n))]}
            sizes_mib = {OURS: [(folder / MANIFEST).stat().st_size / MIB]}
            tables_mib = {OURS: [(folder / TABLES).stat().st_size / MIB]}
            if num_ranks in torch_sizes:
                pickled = torch_metadata(torch_plans(num_tensors, num_ranks))
                sides[TORCH] = lambda pickled=pickled: seconds(lambda: torch_opened(pickled))
                peaks[TORCH] = [peak_mib(lambda pickled=pickled: torch_opened(pickled))]
                sizes_mib[TORCH] = [len(pickled) / MIB]
            yield row(f"open a save, {name}", "ms", in_turns(sides, num_rounds), 1e3)
            yield row(f"open a save, memory, {name}", "MiB", peaks)
            yield row(f"what all ranks read, {name}", "MiB", sizes_mib)
            yield row(f"tables, of which a rank reads its own, {name}", "MiB", tables_mib)
            commits = in_turns({OURS: lambda again=again: seconds(again)}, num_rounds)
            yield row(f"commit by rank 0, {name}", "ms", commits, 1e3)


def verify_rows(sizes: list[int], num_rounds: int) -> Iterator[Row]:
    for num_tensors in sizes:
        with tempfile.TemporaryDirectory() as base:
            folder = Path(base) / "save"
            save({f"t{number}": torch.full((4, 4), float(number)) for number in range(num_tensors)}, folder)
            storage = LocalStorage()
            manifest = read_manifest(storage, folder)

            def verify(manifest=manifest, folder=folder, storage=storage) -> float:
                return seconds(lambda: find_damage(storage, folder, manifest, num_threads=2))

            yield row(f"verify {num_tensors} tensors", "ms", in_turns({OURS: verify}, num_rounds), 1e3)


def rows(quick: bool) -> list[Row]:
    """The rows of this benchmark; `quick`: small sizes, in a few seconds."""
    num_tensors, num_rounds = (90, 1) if quick else (1000, 2)
    sizes = [64, 256] if quick else [256, 1024, 2048, 16384]
    # torch's planner takes half a minute for 2,048 ranks, and as long to be given what they want to write.
    torch_sizes = sizes if quick else [256, 1024]
    return [
        *plan_rows(num_tensors, sizes, torch_sizes, num_rounds),
        *manifest_rows(num_tensors, sizes[:-1], torch_sizes[:1], num_rounds),
        *verify_rows([1000] if quick else [10_000, 100_000], num_rounds),
    ]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args()
    finish(rows(options.quick), options.json)


if __name__ == "__main__":
    main()
