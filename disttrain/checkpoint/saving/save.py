"""Saving, collectively: agree on the plan, write, agree on the outcome, commit by one rename."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import xxhash

from disttrain._python.garbage import uncollected
from disttrain.checkpoint.format.image import Kind
from disttrain.checkpoint.format.manifest import FORMAT, VERSION
from disttrain.checkpoint.outline import Outline, with_one_way
from disttrain.checkpoint.plan import RankPlan, SavePlans, plan_save
from disttrain.checkpoint.saving.alike import Group, described_values, refuse_differing
from disttrain.checkpoint.saving.commit import Contents, Target, check_names, commit, temporary_folder
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.saving.copies_compared import differing_copies, digest_of_all, warn_of_copies
from disttrain.checkpoint.saving.digests import Digests
from disttrain.checkpoint.saving.writer import Item, value_item, write_items
from disttrain.checkpoint.state.taking_apart import holds, take_apart
from disttrain.checkpoint.state.tree import Tree, local_parts
from disttrain.checkpoint.stateful import PerRank, Value
from disttrain.checkpoint.storage.base import Storage
from disttrain.checkpoint.storage.claims import Claim
from disttrain.errors import CheckpointError, ShapeError
from disttrain.process_group.calls.packing import pack
from disttrain.version import __version__


def save_folder(
    consensus: Consensus,
    state: dict[str, Any],
    path: Path,
    storage: Storage,
    claim: Claim | None = None,
    *,
    overwrites: bool = False,
    is_marked: bool = False,
) -> None:
    """`save`, by ranks that have met already; `claim`: of a Checkpointer, of whose saves it is one; `overwrites`,
    `is_marked`: see `Target`."""

    def target_of(save_id: str) -> Target:
        return Target(path, save_id, None if claim is None else claim.name, overwrites, is_marked)

    tree = Tree(consensus.operation)
    outline = Outline()
    copies: dict[str, bytes] = {}
    with ExitStack() as stack, uncollected():

        def describe() -> list[Any]:
            nonlocal tree, outline, copies
            tree = take_apart(consensus.operation, state)
            outline = tree.outline()
            if consensus.size > 1:
                copies = Digests(tree.taken_as_alike(outline)).read()
            of_values = digest_of_values(tree, outline.compared)
            return [path.name, digest_of(outline), of_values, findings(tree), digest_of_all(copies)]

        def begin(described: list[list[Any]]) -> list[Any]:
            names, digests, of_values, findings_of_all, of_copies = zip(*described, strict=True)
            check_names(names)
            warn_of_no_tensor(findings_of_all)
            if claim is not None:
                claim.ensure()
            target = target_of(uuid4().hex)
            stack.enter_context(temporary_folder(storage, target))
            return [target.save_id, *(len(set(column)) == 1 for column in (digests, of_values, of_copies))]

        save_id, are_alike, values_are_alike, copies_are_alike = consensus.agree(describe, begin)
        values = {} if values_are_alike else packed_values(tree, outline.compared)
        outlines: list[Outline] = [outline] * consensus.size
        differing: list[str] = []
        if not are_alike:
            outlines, differing = all_outlines(consensus, outline, values, copies)
        elif not (values_are_alike and copies_are_alike):
            differing = consensus.agree(
                lambda: [described_values(values), copies], lambda rows: look_at(consensus, rows)
            )
        target = target_of(save_id)

        plans = plan_save([])

        def write() -> list[Any]:
            nonlocal plans
            plans = plan_save(outlines, differing)
            items = items_of(tree, plans[consensus.rank])
            return write_items(storage, target.folder, consensus.rank, items, metadata_of(save_id)).to_plain()

        consensus.agree(write, lambda rows: commit(storage, target, contents_of(outlines, plans), rows))


def digest_of(outline: Outline) -> bytes:
    """Equal for equal outlines."""
    return xxhash.xxh3_128_digest(pack(outline.to_plain()))


def metadata_of(save_id: str) -> dict[str, str]:
    """Metadata in the header of each data file."""
    return {"format": FORMAT, "version": str(VERSION), "save_id": save_id}


def digest_of_values(tree: Tree, names: Sequence[str]) -> bytes:
    """Equal for values that are packed alike."""
    values = tree.compared(names)
    try:
        return xxhash.xxh3_128_digest(pack([list(values), list(values.values())]))
    except ShapeError:
        packed_values(tree, names)  # raises for the one that cannot be packed, by name
        raise


def packed_values(tree: Tree, names: Sequence[str]) -> dict[str, bytes]:
    """The values by these names, packed. Raises CheckpointError for one that cannot be saved."""
    return {name: _packed(tree, name, value) for name, value in tree.compared(names).items()}


def packed_groups(tree: Tree, shared: Sequence[tuple[int, Sequence[str]]]) -> list[Group]:
    """The values that other ranks have as well; see `shared_names`."""
    names_of_all = [name for _, names in shared for name in names]
    values = tree.compared(names_of_all)
    try:
        return [Group(number, names, pack([values[name] for name in names])) for number, names in shared]
    except ShapeError:
        packed_values(tree, names_of_all)  # raises for the one that cannot be packed, by name
        raise


def _packed(tree: Tree, name: str, value: Any) -> bytes:
    try:
        return pack(value)
    except ShapeError as error:
        raise CheckpointError(tree.operation, f"{name!r}: {error.problem}", error.remedy) from None


def findings(tree: Tree) -> list[Any]:
    """The names of a state that has values only, which may be a mistake; empty for other states."""
    if any(holds((torch.Tensor, np.ndarray), leaf) for leaf in tree.leaves.values() if not isinstance(leaf, PerRank)):
        return [True, []]
    return [bool(tree.leaves) and not tree.bare, tree.bare[:8]]


def warn_of_no_tensor(findings_of_all: Sequence[Sequence[Any]]) -> None:
    """Warns on rank 0 of a save without tensors: weights that should be in it would be missed when it is too late."""
    if any(is_meant for is_meant, _ in findings_of_all):
        return
    names = ", ".join(map(repr, dict.fromkeys(name for _, names in findings_of_all for name in names)))
    contents = f"only plain values ({names})" if names else "nothing"
    warnings.warn(
        f"There is no tensor in the state that is saved, {contents}. Look whether the model's state is in it: "
        "get_state_dict returns two dicts. Values that are to be saved alone may stand in Value.",
        RuntimeWarning,
        stacklevel=2,
    )


def look_at(consensus: Consensus, rows: Sequence[Sequence[Any]]) -> list[str]:
    """Compares, on rank 0, what each rank has found of its values and of its plain tensors. Returns which of the latter
    differ; raises CheckpointError where ranks have different values by one name."""
    refuse_differing(consensus.operation, [described for described, _ in rows])
    differing = differing_copies([copies for _, copies in rows])
    warn_of_copies(differing)
    return differing


def all_outlines(
    consensus: Consensus, outline: Outline, values: Mapping[str, bytes], copies: Mapping[str, bytes]
) -> tuple[list[Outline], list[str]]:
    """The outlines of all ranks, if they differ (ranks with different parts of a model), and the result of `look_at`
    for values and plain tensors."""

    def decide(ballots: list[list[Any]]) -> tuple[list[Any], list[int], list[str]]:
        differing = look_at(consensus, [row for _, *row in ballots])
        return *_shared([plain for plain, *_ in ballots]), differing

    unique, indices, differing = consensus.agree(lambda: [outline.to_plain(), described_values(values), copies], decide)
    outlines = with_one_way([Outline.from_plain(plain) for plain in unique])
    return [outlines[index] for index in indices], differing


def _shared(plains: list[list[Any]]) -> tuple[list[Any], list[int]]:
    """The different outlines, each once, and the index of each rank's outline."""
    unique: list[Any] = []
    index_of: dict[bytes, int] = {}
    of_rank = []
    for plain in plains:
        index = index_of.setdefault(pack(plain), len(unique))
        if index == len(unique):
            unique.append(plain)
        of_rank.append(index)
    return unique, of_rank


def items_of(tree: Tree, plan: RankPlan) -> list[Item]:
    """The items that this rank writes, sharing memory with the state's tensors."""
    items = []
    for name in plan.values:
        leaf = tree.leaves[name]
        value = leaf.value if isinstance(leaf, PerRank | Value) else leaf
        items.append(value_item(name, value, "own" if isinstance(leaf, PerRank) else "value"))
    parts_of: dict[str, Any] = {}
    for name, box in plan.parts:
        parts = parts_of.get(name) or parts_of.setdefault(name, local_parts(tree.leaves[name]))
        kind: Kind = "tensor" if name in plan.listed else "part"
        if box in parts:
            items.append(Item(name, box, parts[box], kind))
        else:
            around = next(part for part in parts if part.intersection(box) == box)
            items.append(Item(name, box, parts[around][box.seen_from(around.origin).slices()], kind))
    return items


def made_by() -> str:
    """Versions of disttrain and torch, for people."""
    return f"disttrain {__version__}, torch {torch.__version__}"


def contents_of(outlines: Sequence[Outline], plans: SavePlans) -> Contents:
    """Contents of the save, for the manifest that rank 0 writes."""
    unique = {id(outline): outline for outline in outlines}.values()
    specs = {name: spec for outline in unique for name, spec in outline.tensors.items()}
    return Contents(
        made_by(),
        {name: (spec.shape, spec.dtype) for name, spec in specs.items()},
        plans.owners(),
        {name: first for outline in unique for name, first in outline.same_as.items()},
        plans.spreads(),
    )
