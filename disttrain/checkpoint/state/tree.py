"""A state as a flat list of named leaves, and back.

`state/taking_apart.py` makes the list. A leaf's name is its keys joined by `/` (`~` and `/` within a key are written
`~0` and `~1`, as in RFC 6901); it is a tensor, or a value that msgpack can carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_name
from disttrain.checkpoint.layout import TensorSpec, compact, parts_at
from disttrain.checkpoint.outline import Outline, is_like_a_value
from disttrain.checkpoint.stateful import PerRank, Value
from disttrain.dtensor import DTensor, Partial
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.spec.shard_sizes import num_blocks
from disttrain.errors import CheckpointError

Make = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Opening:
    """A place where a load puts leaves that the state does not have: the dict they go to, and how tensors are made."""

    root: Callable[[], dict[str, Any]]
    make: Make


@dataclass
class Tree:
    """A state as leaves: where each leaf is, where unknown leaves may be put, and which objects to call after a
    load."""

    operation: str
    leaves: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    openings: dict[str, Opening] = field(default_factory=dict)
    listeners: list[Callable[[], Any]] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    """Names of values that stand in the state as they are: no Value or PerRank says that they are meant to."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}

    def outline(self) -> Outline:
        """The outline of the state, for the plan. Tensors that are the same object under several names are there
        once."""
        first: dict[int, str] = {}
        tensors: dict[str, TensorSpec] = {}
        same_as: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            if first.setdefault(id(tensor), name) == name:
                tensors[name] = spec_of(self.operation, name, tensor)
            else:
                same_as[name] = first[id(tensor)]
        rest = {name: leaf for name, leaf in self.leaves.items() if not isinstance(leaf, torch.Tensor)}
        return Outline(
            tensors,
            [name for name, leaf in rest.items() if not isinstance(leaf, PerRank)],
            [name for name, leaf in rest.items() if isinstance(leaf, PerRank)],
            same_as,
        )

    def compared(self, names: Iterable[str]) -> dict[str, Any]:
        """The values to compare among ranks, see `Outline.compared`, in the order of names. Of tensors those on CPUs: a
        save does not wait here for a GPU."""
        values: dict[str, Any] = {}
        for name in sorted(names):
            leaf = self.leaves[name]
            if isinstance(leaf, torch.Tensor):
                # There may be many numbers, such as the steps of optimizers; packing numbers is faster than packing
                # tensors.
                values[name] = None if not leaf.is_cpu else leaf if leaf.ndim else leaf.item()
            else:
                values[name] = leaf.value if isinstance(leaf, Value) else leaf
        return values

    def taken_as_alike(self, outline: Outline) -> dict[str, torch.Tensor]:
        """The plain tensors that are not `compared`."""
        ways = {name: outline.tensors[outline.same_as.get(name, name)] for name in (*outline.tensors, *outline.same_as)}
        return {
            name: self.leaves[name]
            for name, way in ways.items()
            if way.is_plain and not (self.leaves[name].is_cpu and is_like_a_value(way))
        }

    def make_for(self, name: str) -> Make | None:
        """The function that makes a tensor for a leaf that the state does not have; None where no place is open for
        it."""
        opening = self._opening_of(name)
        return None if opening is None else self.openings[opening].make

    def put(self, name: str, value: Any) -> None:
        """Set a leaf, in a place that there is or one that is open."""
        if name in self.places:
            parent, key = self.places[name]
            parent[key] = _named_as(parent[key], value)
            return
        opening = self._opening_of(name)
        assert opening is not None
        parent = self.openings[opening].root()
        *inner, last = parts_of(name.removeprefix(f"{opening}/"))
        for key in inner:
            parent = parent.setdefault(key, {})
        parent[last] = value

    def _opening_of(self, name: str) -> str | None:
        above = name.rpartition("/")[0]
        while above and above not in self.openings:
            above = above.rpartition("/")[0]
        return above or None


def _named_as(present: Any, value: Any) -> Any:
    """`value` with the named tuples that are in `present`: a save knows them as tuples alone."""
    kind = type(present)
    if isinstance(present, tuple) and type(value) is tuple and len(present) == len(value):
        items = map(_named_as, present, value)
        return kind(*items) if hasattr(kind, "_fields") else tuple(items)
    if kind is list and type(value) is list and len(present) == len(value):
        return list(map(_named_as, present, value))
    if isinstance(present, dict) and isinstance(value, dict) and present.keys() == value.keys():
        value.update({key: _named_as(present[key], item) for key, item in value.items()})
    return value


def parts_of(name: str) -> list[str]:
    """The keys that a name joins."""
    return [key.replace("~1", "/").replace("~0", "~") for key in name.split("/")]


def name_of(keys: Iterable[str]) -> str:
    """The name of the leaf under these keys."""
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys)


def spec_of(operation: str, name: str, tensor: torch.Tensor) -> TensorSpec:
    """The tensor's shape, dtype and placements. Raises CheckpointError for partial values, LayoutError for torch's
    DTensors."""
    check_ours(operation, f"tensor {name!r}", tensor)
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    if not isinstance(tensor, DTensor):
        return TensorSpec(shape, dtype)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            operation,
            f"tensor {name!r} lies as {list(tensor.placements)}: no rank has its values.",
            "Redistribute it to Shard or Replicate first.",
        )
    mesh = tensor.device_mesh
    cuts = tuple(placement.cut_dim for placement in tensor.placements)
    blocks = tuple(map(num_blocks, tensor.placements))
    return TensorSpec(shape, dtype, compact(mesh.layout.members), mesh.shape, cuts, blocks if max(blocks) > 1 else ())


def local_parts(tensor: torch.Tensor) -> dict[Box, torch.Tensor]:
    """This rank's parts, sharing memory with `tensor`, by where in the whole they lie; none of them is empty."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return {Box.whole(shape): tensor.detach()} if tensor.numel() else {}
    with torch.no_grad():
        local = tensor.to_local()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return {}
    parts = parts_at(shape, mesh.shape, coordinate, tensor.placements)
    return {part.box: local[part.local_slices()] for part in parts}


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Some names, for a message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
