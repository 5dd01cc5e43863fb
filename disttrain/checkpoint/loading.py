"""Loading, collectively and in place: read the manifest, compare names, read what this rank needs, hand it over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.agreement import Council
from disttrain.checkpoint.call_forms import meet
from disttrain.checkpoint.dtypes import dtype_named
from disttrain.checkpoint.fits import LoadReport, Misfit, Misfits, Rename, Rules, compare, judge, report_of, with_names
from disttrain.checkpoint.manifest import Chunk, Manifest, read_manifest
from disttrain.checkpoint.plan import plan_load
from disttrain.checkpoint.reader import Reader
from disttrain.checkpoint.stateful import PerRank, Value
from disttrain.checkpoint.storage import Readable, Storage, locate
from disttrain.checkpoint.tree import Tree, local_parts, take_apart
from disttrain.errors import CheckpointCorruptError, CheckpointError
from disttrain.process_group import ProcessGroup


@dataclass(frozen=True)
class Source:
    """An opened save of any format. `own_name`, where there is one, gives the state's name for one of the save's."""

    where: str
    manifest: Manifest
    reader: Reader
    own_name: Callable[[Tree, str], str] | None = None


@dataclass
class _Loaded:
    """What a load brings besides tensors that are filled in place: by name, for `Tree.put`."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def load(
    state_dict: dict[str, Any],
    path: str | Path | None = None,
    *,
    storage: Storage | None = None,
    allow: Iterable[Misfit] = (),
    rename: Rename | None = None,
    convert: str | Iterable[str] = (),
    checkpoint_id: str | Path | None = None,
    storage_reader: None = None,
    planner: None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load a save into a state of the same names, in place.

    Tensors are filled as they lie, on however many ranks; values are replaced; modules and Statefuls take on their
    state.
    Args:    allow    what may be left alone instead of being an error: "missing" from the save, "unexpected" in it,
                      "mismatched" in kind, shape or dtype
             rename   the state's name for a name in the save, as a function or a dict of those that differ
             convert  names, or patterns such as "model/*", of tensors whose dtype may differ from the saved one
             checkpoint_id, process_group, no_dist  as in torch.distributed.checkpoint: another word for path; the
                      default group; this process alone. storage_reader and planner are refused.
    Returns: what was left alone, and what was converted; the same on every rank.
    Raises:  CheckpointError, on every rank, when there is no save, or when names, shapes or dtypes differ and may not:
             then nothing has been touched. CheckpointCorruptError when bytes are not those that were saved: then the
             state is partly loaded, and must not be used.
    Collective: every rank of the default world, or one process without a world.
    """
    rules = Rules.of(allow, convert, rename)
    council, where = meet(
        "load", path, checkpoint_id, process_group, no_dist, storage_reader=storage_reader, planner=planner
    )
    storage, folder = locate(where, storage)
    return load_folder(council, state_dict, folder, storage, rules)


def load_folder(
    council: Council, state: dict[str, Any], folder: Path, storage: Storage, rules: Rules | None = None
) -> LoadReport:
    """`load`, by ranks that have met already."""
    return load_source(council, state, lambda: open_save(storage, folder), rules or Rules())


def open_save(storage: Readable, folder: Path) -> Source:
    """A save of our own format. Raises CheckpointError when there is none."""
    manifest = read_manifest(storage, folder)
    return Source(str(folder), manifest, Reader(storage, folder, manifest))


def load_source(council: Council, state: dict[str, Any], open_source: Callable[[], Source], rules: Rules) -> LoadReport:
    """`load` from a save of any format, which each rank opens for itself."""
    tree = Tree(council.operation)
    source: Source | None = None
    manifest = Manifest("", 0, "", {}, {}, {}, {})
    misfits = Misfits([], [], {}, [])
    loaded = _Loaded({}, {})

    def look() -> list[Any]:
        nonlocal tree, source, manifest, misfits
        source = open_source()
        tree = take_apart(council.operation, state)
        manifest = rules.renamed(source.manifest)
        if source.own_name is not None:
            own_name = source.own_name
            manifest = with_names(manifest, lambda name: own_name(tree, name))
        misfits = compare(tree, manifest, rules)
        return [source.where, manifest.save_id, *misfits.to_plain()]

    def decide(found: list[list[Any]]) -> list[Any]:
        where = found[0][0]
        if len({save_id for _, save_id, *_ in found}) > 1:
            raise CheckpointError(
                "load", f"{where} holds different saves on different ranks.", "Use a folder that all nodes share."
            )
        return judge(where, rules, [rest for _, _, *rest in found])

    def read() -> None:
        nonlocal loaded
        assert source is not None
        loaded = _read(source.reader, manifest, tree, set(misfits.mismatched), council.rank)

    def hand_over() -> None:
        for name, value in {**loaded.tensors, **loaded.values}.items():
            tree.put(name, value)
        for listener in tree.listeners:
            listener()

    report = council.agree(look, decide)
    council.agree(read)
    council.agree(hand_over)
    return report_of(report)


def _read(reader: Reader, manifest: Manifest, tree: Tree, left_alone: set[str], rank: int) -> _Loaded:
    made: dict[str, torch.Tensor] = {}
    for name in (*manifest.tensors, *manifest.same_as):
        make = None if name in tree.leaves else tree.make_for(name)
        saved = manifest.tensor_named(name)
        if make is not None and saved is not None:
            made[name] = make(name.rpartition("/")[2], saved.shape, dtype_named(saved.dtype))
    known = {
        name: tensor
        for name, tensor in tree.tensors.items()
        if name not in left_alone and manifest.tensor_named(name) is not None
    }
    targets = {name: local_parts(tensor) for name, tensor in {**known, **made}.items()}
    with torch.no_grad():
        reader.read_tensors(plan_load(manifest, targets), targets)
    return _Loaded(made, _read_values(reader, manifest, tree, left_alone, rank))


def _read_values(reader: Reader, manifest: Manifest, tree: Tree, left_alone: set[str], rank: int) -> dict[str, Any]:
    def is_wanted(name: str) -> bool:
        return (name in tree.leaves or tree.make_for(name) is not None) and name not in left_alone

    values = reader.read_values({name: chunk for name, chunk in manifest.values.items() if is_wanted(name)})
    owners = {name: owner_of(chunks, rank) for name, chunks in manifest.per_rank.items() if is_wanted(name)}
    own = reader.read_values({name: manifest.per_rank[name][owner] for name, owner in owners.items()})
    wrapped = {
        name: Value(value) if isinstance(tree.leaves.get(name), Value) else value for name, value in values.items()
    }
    return {**wrapped, **{name: PerRank(value, owners[name]) for name, value in own.items()}}


def owner_of(chunks: Mapping[int, Chunk], rank: int) -> int:
    """Whose value this rank gets: its own, or that of another where it did not save."""
    saved = sorted(chunks)
    if not saved:
        raise CheckpointCorruptError("load", "a value per rank has no rank.", "Load another save.")
    return rank if rank in chunks else saved[rank % len(saved)]
