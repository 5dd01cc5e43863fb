"""Loading, collectively and in place: read the manifest, compare names, read what this rank needs, hand it over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from disttrain._python.garbage import uncollected
from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.format.reading import read_manifest
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.loading.filling import Loaded, fill
from disttrain.checkpoint.loading.fits import LoadReport, Misfits, Rules, compare, judge, report_of, with_names
from disttrain.checkpoint.loading.reader import Reader
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.state.taking_apart import take_apart
from disttrain.checkpoint.state.tree import Tree
from disttrain.checkpoint.storage.base import Readable, Storage
from disttrain.checkpoint.storage.folders import standing
from disttrain.errors import CheckpointError


def load_folder(
    consensus: Consensus, state: dict[str, Any], folder: Path, storage: Storage, rules: Rules | None = None
) -> LoadReport:
    """`load`, by ranks that have met already."""
    return load_source(consensus, state, lambda: open_save(storage, folder), rules or Rules())


def open_save(storage: Readable, folder: Path) -> Source:
    """A save of our own format. Raises CheckpointError when there is none."""
    folder = standing(storage, folder)
    manifest = read_manifest(storage, folder)
    return Source(str(folder), manifest, Reader(storage, folder, manifest))


def load_source(
    consensus: Consensus,
    state: dict[str, Any],
    open_source: Callable[[], Source],
    rules: Rules,
    *,
    shares_reads: bool = True,
) -> LoadReport:
    """`load` from a save of any format, which each rank opens for itself."""
    tree = Tree(consensus.operation)
    source: Source | None = None
    manifest = Manifest("", 0, "", {}, {}, {}, {})
    misfits = Misfits([], [], {}, [])
    loaded = Loaded()

    def look() -> list[Any]:
        nonlocal tree, source, manifest, misfits
        source = open_source()
        tree = take_apart(consensus.operation, state)
        manifest = rules.renamed(source.manifest)
        if source.own_name is not None:
            own_name = source.own_name
            manifest = with_names(manifest, lambda name: own_name(tree, name))
        if source.joined is not None:
            manifest = source.joined(tree, manifest)
        misfits = compare(tree, manifest, rules)
        return [source.where, manifest.save_id, *misfits.to_plain()]

    def decide(rows: list[list[Any]]) -> list[Any]:
        where = rows[0][0]
        if len({save_id for _, save_id, *_ in rows}) > 1:
            raise CheckpointError(
                "load", f"{where} holds different saves on different ranks.", "Use a folder that all nodes share."
            )
        return judge(where, rules, [rest for _, _, *rest in rows])

    def hand_over() -> None:
        for name, value in {**loaded.tensors, **loaded.values}.items():
            tree.put(name, value)
        for listener in tree.listeners:
            listener()

    with uncollected():
        report = consensus.agree(look, decide)
        assert source is not None
        # Names that only this rank gives would make a plan that only this rank has.
        shares_reads = shares_reads and rules.rename is None
        loaded = fill(consensus, source.reader, manifest, tree, set(misfits.mismatched), shares_reads=shares_reads)
    consensus.agree(hand_over)
    return report_of(report)
