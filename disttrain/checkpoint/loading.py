"""Loading, collectively and in place: read the manifest, compare names, read what this rank needs, hand it over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.checkpoint.agreement import Council
from disttrain.checkpoint.call_forms import meet
from disttrain.checkpoint.filling import Loaded, fill
from disttrain.checkpoint.fits import LoadReport, Misfit, Misfits, Rename, Rules, compare, judge, report_of, with_names
from disttrain.checkpoint.manifest import Manifest
from disttrain.checkpoint.manifest_reading import read_manifest
from disttrain.checkpoint.reader import Reader
from disttrain.checkpoint.storage import Readable, Storage, locate
from disttrain.checkpoint.taking_apart import take_apart
from disttrain.checkpoint.tree import Tree
from disttrain.errors import CheckpointError
from disttrain.garbage import uncollected
from disttrain.process_group import ProcessGroup


@dataclass(frozen=True)
class Source:
    """An opened save of any format. `own_name`, where there is one, gives the state's name for one of the save's."""

    where: str
    manifest: Manifest
    reader: Reader
    own_name: Callable[[Tree, str], str] | None = None


def load(
    state_dict: dict[str, Any],
    path: str | Path | None = None,
    *,
    storage: Storage | None = None,
    allow: Iterable[Misfit] = (),
    rename: Rename | None = None,
    convert: str | Iterable[str] = (),
    shares_reads: bool = True,
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
             shares_reads  what several ranks want alike, one of them reads for all; False: each for itself, which is
                      faster where storage is faster than the network
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
    return load_source(council, state_dict, lambda: open_save(storage, folder), rules, shares_reads=shares_reads)


def load_folder(
    council: Council, state: dict[str, Any], folder: Path, storage: Storage, rules: Rules | None = None
) -> LoadReport:
    """`load`, by ranks that have met already."""
    return load_source(council, state, lambda: open_save(storage, folder), rules or Rules())


def open_save(storage: Readable, folder: Path) -> Source:
    """A save of our own format. Raises CheckpointError when there is none."""
    manifest = read_manifest(storage, folder)
    return Source(str(folder), manifest, Reader(storage, folder, manifest))


def load_source(
    council: Council,
    state: dict[str, Any],
    open_source: Callable[[], Source],
    rules: Rules,
    *,
    shares_reads: bool = True,
) -> LoadReport:
    """`load` from a save of any format, which each rank opens for itself."""
    tree = Tree(council.operation)
    source: Source | None = None
    manifest = Manifest("", 0, "", {}, {}, {}, {})
    misfits = Misfits([], [], {}, [])
    loaded = Loaded()

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

    def hand_over() -> None:
        for name, value in {**loaded.tensors, **loaded.values}.items():
            tree.put(name, value)
        for listener in tree.listeners:
            listener()

    with uncollected():
        report = council.agree(look, decide)
        assert source is not None
        # Names that only this rank gives would make a plan that only this rank has.
        shares_reads = shares_reads and rules.rename is None
        loaded = fill(council, source.reader, manifest, tree, set(misfits.mismatched), shares_reads=shares_reads)
    council.agree(hand_over)
    return report_of(report)
