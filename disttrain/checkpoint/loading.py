"""Loading, collectively and in place: read the manifest, compare names, read what this rank needs, hand it over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.agreement import Council
from disttrain.checkpoint.dtypes import dtype_named
from disttrain.checkpoint.manifest import MANIFEST, Chunk, Manifest, decode
from disttrain.checkpoint.plan import mismatches, plan_load
from disttrain.checkpoint.reader import Reader
from disttrain.checkpoint.stateful import PerRank, Value
from disttrain.checkpoint.storage import LocalStorage, Storage
from disttrain.checkpoint.tree import Tree, listed, local_parts, sharding_of, take_apart
from disttrain.errors import CheckpointCorruptError, CheckpointError


def load(state_dict: dict[str, Any], path: str | Path, *, storage: Storage | None = None) -> None:
    """Load a save into a state of the same names, in place.

    Tensors are filled as they lie, on however many ranks; values are replaced; modules and Statefuls take on their
    state.
    Raises:  CheckpointError, on every rank, when there is no save, or when names, shapes or dtypes differ: then nothing
             has been touched. CheckpointCorruptError when bytes are not those that were saved: then the state is
             partly loaded, and must not be used.
    Collective: every rank of the default world, or one process without a world.
    """
    load_folder(Council("load"), state_dict, Path(path), storage or LocalStorage())


@dataclass
class _Loaded:
    """What a load brings besides tensors that are filled in place: by name, for `Tree.put`."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def load_folder(council: Council, state: dict[str, Any], folder: Path, storage: Storage) -> None:
    """`load`, by ranks that have met already."""
    tree = Tree(council.operation)
    manifest = Manifest("", 0, "", {}, {}, {}, {})
    loaded = _Loaded({}, {})

    def compare() -> list[Any]:
        nonlocal tree, manifest
        manifest = read_manifest(storage, folder)
        tree = take_apart(council.operation, state)
        return [manifest.save_id, *compare_names(tree, manifest)]

    def read() -> None:
        nonlocal loaded
        loaded = _read(Reader(storage, folder, manifest), manifest, tree, council.rank)

    def hand_over() -> None:
        for name, value in {**loaded.tensors, **loaded.values}.items():
            tree.put(name, value)
        for listener in tree.listeners:
            listener()

    council.agree(compare, lambda found: _judge(folder, found))
    council.agree(read)
    council.agree(hand_over)


def read_manifest(storage: Storage, folder: Path) -> Manifest:
    """The manifest of the save in `folder`. Raises CheckpointError when there is none."""
    names = storage.names(folder)
    if MANIFEST not in names:
        what = f"has no {MANIFEST}" if names else "is not there, or is empty"
        raise CheckpointError("load", f"{folder} {what}: no save was finished there.", "Give the folder of a save.")
    with storage.open_file(folder / MANIFEST) as file:
        data = bytearray(file.num_bytes)
        num_read = file.read_at(0, memoryview(data))
    return decode(bytes(data[:num_read]), str(folder / MANIFEST))


def compare_names(tree: Tree, manifest: Manifest) -> tuple[list[str], list[str], list[str]]:
    """What this rank finds wrong: names that the save lacks, names that it lacks, and a sentence per mismatch."""
    saved = {
        **dict.fromkeys((*manifest.tensors, *manifest.same_as), "a tensor"),
        **dict.fromkeys(manifest.values, "a value"),
        **dict.fromkeys(manifest.per_rank, "a value per rank"),
    }
    missing = [name for name in tree.leaves if name not in saved]
    unexpected = [name for name in saved if name not in tree.leaves and tree.make_for(name) is None]
    shardings = {name: sharding_of(tree.operation, name, tensor) for name, tensor in tree.tensors.items()}
    wrong = [
        f"{name} is {saved[name]} there, {_kind(leaf)} here"
        for name, leaf in tree.leaves.items()
        if name in saved and saved[name] != _kind(leaf)
    ]
    return missing, unexpected, wrong + mismatches(manifest, shardings)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return "a tensor"
    return "a value per rank" if isinstance(leaf, PerRank) else "a value"


def _judge(folder: Path, found: list[list[Any]]) -> None:
    """On rank 0: raise one error for whatever any rank found. What one rank does not expect, another may."""
    if len({save_id for save_id, *_ in found}) > 1:
        raise CheckpointError(
            "load", f"{folder} holds different saves on different ranks.", "Use a folder that all nodes share."
        )
    missing = {name for _, names, _, _ in found for name in names}
    unexpected = set.intersection(*({*names} for _, _, names, _ in found))
    wrong = {sentence for _, _, _, sentences in found for sentence in sentences}
    problems = []
    if missing:
        problems.append(f"the save lacks {listed(missing)}")
    if unexpected:
        problems.append(f"the state lacks {listed(unexpected)}")
    if wrong:
        problems.append("; ".join(sorted(wrong)))
    if problems:
        raise CheckpointError(
            "load", f"{folder} does not fit: {'; '.join(problems)}.", "Build the state as it was when it was saved."
        )


def _read(reader: Reader, manifest: Manifest, tree: Tree, rank: int) -> _Loaded:
    made: dict[str, torch.Tensor] = {}
    for name in (*manifest.tensors, *manifest.same_as):
        make = None if name in tree.leaves else tree.make_for(name)
        saved = manifest.tensor_named(name)
        if make is not None and saved is not None:
            made[name] = make(name.rpartition("/")[2], saved.shape, dtype_named(saved.dtype))
    targets = {name: local_parts(tensor) for name, tensor in {**tree.tensors, **made}.items()}
    with torch.no_grad():
        reader.read_tensors(plan_load(manifest, targets), targets)
    return _Loaded(made, _read_values(reader, manifest, tree, rank))


def _read_values(reader: Reader, manifest: Manifest, tree: Tree, rank: int) -> dict[str, Any]:
    def is_wanted(name: str) -> bool:
        return name in tree.leaves or tree.make_for(name) is not None

    values = reader.read_values({name: chunk for name, chunk in manifest.values.items() if is_wanted(name)})
    owners = {name: _owner(chunks, rank) for name, chunks in manifest.per_rank.items() if is_wanted(name)}
    own = reader.read_values({name: manifest.per_rank[name][owner] for name, owner in owners.items()})
    wrapped = {
        name: Value(value) if isinstance(tree.leaves.get(name), Value) else value for name, value in values.items()
    }
    return {**wrapped, **{name: PerRank(value, owners[name]) for name, value in own.items()}}


def _owner(chunks: Mapping[int, Chunk], rank: int) -> int:
    """Whose value this rank gets: its own, or that of another where it did not save."""
    saved = sorted(chunks)
    if not saved:
        raise CheckpointCorruptError("load", "a value per rank has no rank.", "Load another save.")
    return rank if rank in chunks else saved[rank % len(saved)]
