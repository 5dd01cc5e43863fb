"""Fills a rank's tensors from a save, as they are sharded, and returns its values.

If several ranks need the same bytes and have a process group for it, one of them reads for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Chunk, Manifest, TensorEntry
from disttrain.checkpoint.loading.reader import Reader
from disttrain.checkpoint.loading.scattering import Targets
from disttrain.checkpoint.loading.sharing import plan_shared, shared_boxes
from disttrain.checkpoint.loading.spreading import Spreading
from disttrain.checkpoint.outline import Outline
from disttrain.checkpoint.plan import plan_load
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.saving.save import all_outlines, digest_of
from disttrain.checkpoint.state.tree import Tree, local_parts, spec_of
from disttrain.checkpoint.stateful import PerRank, Value
from disttrain.dtensor.views.view_copy import count_writes
from disttrain.errors import CheckpointCorruptError, CheckpointError, DisttrainError


@dataclass
class Loaded:
    """Results of a load besides tensors that are filled in place: by name, for `Tree.put`."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def fill(
    consensus: Consensus, reader: Reader, manifest: Manifest, tree: Tree, left_alone: set[str], *, shares_reads: bool
) -> Loaded:
    """Fill the tree's tensors but those `left_alone`; `shares_reads`: ranks may read for each other.

    The manifest has the names of the tree; where ranks read for each other it is the same on all of them.
    Raises CheckpointError, on every rank, when that failed on some. Collective.
    """
    loaded = Loaded()
    tensors: dict[str, torch.Tensor] = {}
    targets: Targets = {}
    outline = Outline()

    def prepare() -> list[Any]:
        nonlocal tensors, targets, outline
        loaded.tensors.update(_made(manifest, tree))
        tensors = {**_known(manifest, tree, left_alone), **loaded.tensors}
        targets = {name: local_parts(tensor) for name, tensor in tensors.items()}
        if not (shares_reads and reader.can_share and _has_group(consensus)):
            return [False, b""]
        outline = Outline({name: spec_of(consensus.operation, name, tensor) for name, tensor in tensors.items()})
        return [True, digest_of(outline)]

    can_share, are_alike = consensus.agree(prepare, _compared)
    outlines: Sequence[Outline] = []
    if can_share:
        outlines = [outline] * consensus.size if are_alike else all_outlines(consensus, outline, {}, {})[0]

    direct = targets
    spreading: Spreading | None = None
    if consensus.world is not None and outlines:
        world = consensus.world

        def get_ready() -> None:
            nonlocal direct, spreading
            boxes = shared_boxes([outline.tensors for outline in outlines], consensus.rank)
            spreading = Spreading(reader, plan_shared(manifest, boxes), targets, world)
            shared = {(name, box) for by_name in boxes.values() for name, of_name in by_name.items() for box in of_name}
            direct = {
                name: {box: part for box, part in parts.items() if (name, box) not in shared}
                for name, parts in targets.items()
            }

        consensus.agree(get_ready)

    def read() -> None:
        if spreading is not None:
            spreading.run()
        with torch.no_grad():
            reader.read_tensors(plan_load(manifest, direct), direct)
        # The bytes are not written by operators, which would count their writes.
        count_writes(tensor for tensor in tensors.values() if not tensor.is_inference())
        loaded.values.update(_read_values(reader, manifest, tree, left_alone, consensus.rank))

    consensus.agree(read)
    return loaded


def _has_group(consensus: Consensus) -> bool:
    """True if there are other ranks, and a transport for host memory."""
    return (
        consensus.world is not None
        and consensus.is_whole
        and consensus.size > 1
        and consensus.world.default_group.serves("cpu")
    )


def _compared(ballots: Sequence[list[Any]]) -> list[bool]:
    can_share, digests = zip(*ballots, strict=True)
    return [all(can_share), len(set(digests)) == 1]


def _made(manifest: Manifest, tree: Tree) -> dict[str, torch.Tensor]:
    """Tensors for what the state has an open place for."""
    made = {}
    for name in (*manifest.tensors, *manifest.same_as):
        make = None if name in tree.leaves else tree.make_for(name)
        saved = manifest.tensor_named(name)
        if make is not None and saved is not None:
            made[name] = allocated(partial(make, name.rpartition("/")[2]), name, saved)
    return made


def allocated(
    make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], name: str, saved: TensorEntry
) -> torch.Tensor:
    """An uninitialised tensor for a saved one. Raises CheckpointError where there is no memory for it."""
    dtype = dtype_named(saved.dtype)
    try:
        return make(saved.shape, dtype)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, DisttrainError):
            raise
        num_bytes = math.prod(saved.shape) * dtype.itemsize
        problem = f"there is no memory for the {num_bytes} bytes of {name!r}: {error}."
        raise CheckpointError("load", problem, "Load it on more ranks, or a part of it.") from error


def _known(manifest: Manifest, tree: Tree, left_alone: set[str]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in tree.tensors.items()
        if name not in left_alone and manifest.tensor_named(name) is not None
    }


def _read_values(reader: Reader, manifest: Manifest, tree: Tree, left_alone: set[str], rank: int) -> dict[str, Any]:
    def is_wanted(name: str) -> bool:
        return (name in tree.leaves or tree.make_for(name) is not None) and name not in left_alone

    values = reader.read_values({name: chunk for name, chunk in manifest.values.items() if is_wanted(name)})
    owners = {name: owner_of(chunks, rank) for name, chunks in manifest.per_rank.items() if is_wanted(name)}
    per_rank = reader.read_values({name: manifest.per_rank[name][owner] for name, owner in owners.items()})
    wrapped = {
        name: Value(value) if isinstance(tree.leaves.get(name), Value) else value for name, value in values.items()
    }
    return {**wrapped, **{name: PerRank(value, owners[name]) for name, value in per_rank.items()}}


def owner_of(chunks: Mapping[int, Chunk], rank: int) -> int:
    """The rank whose value this rank loads: itself, or another where it did not save."""
    if not chunks:
        raise CheckpointCorruptError("load", "a value per rank has no rank.", "Load another save.")
    return rank if rank in chunks else sorted(chunks)[rank % len(chunks)]
