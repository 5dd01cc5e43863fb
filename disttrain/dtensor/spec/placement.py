"""Placements: what one mesh axis does to a tensor. Values, compared by content.

A tensor dim may stand for several factors, the outer ones changing slowest: flattening a batch and a sequence makes one
dim of two. Shard cuts a dim's outermost factor, StridedShard one further in; so views of sharded tensors move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from disttrain.mesh._torch import GraphConstant, hold_in_graphs
from disttrain.process_group.beside.torch_callers import check_caller


@dataclass(frozen=True)
class Placement(GraphConstant):
    """Abstract: Shard, Replicate or Partial."""

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """The expression by which a compiled graph's code makes it, and the names in that."""
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__name__}({values})", {type(self).__name__: type(self)}

    @property
    def cut_dim(self) -> int | None:
        """The tensor dim of which the ranks hold different pieces; None for Replicate and Partial."""
        return None

    def __str__(self) -> str:
        check_caller("placement")  # torch's functions put what they do not know into an error
        return repr(self)

    def is_shard(self, dim: int | None = None) -> bool:
        """True for Shard, of `dim` if one is given; StridedShard is another kind."""
        check_caller("placement")
        return False

    def is_replicate(self) -> bool:
        check_caller("placement")
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True for Partial, with `reduce_op` if one is given."""
        check_caller("placement")
        return False


@dataclass(frozen=True)
class Shard(Placement):
    """The ranks along the axis hold consecutive pieces of tensor dim `dim`, cut as `torch.chunk` cuts.

    A dim that does not divide leaves the last ranks with less, or nothing.
    """

    dim: int

    @property
    def cut_dim(self) -> int:
        return self.dim

    def is_shard(self, dim: int | None = None) -> bool:
        check_caller("placement")
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class StridedShard(Placement):
    """Tensor dim `dim` is `num_blocks` equal blocks, and each rank along the axis holds its piece of every block.

    Blocks are counted in what earlier axes leave of the dim. A view of (4, 6) sharded along dim 1 as (24,) lies so,
    with 4 blocks; and a parameter that tensor parallelism cuts first and FSDP next lies so along the axis of FSDP.
    """

    dim: int
    num_blocks: int

    @property
    def cut_dim(self) -> int:
        return self.dim

    def __hash__(self) -> int:
        symbol = getattr(self.num_blocks, "node", None)
        # While a compiler traces, sizes are its symbols, which have no hash.
        return hash((self.dim, self.num_blocks if symbol is None else (symbol.expr, id(symbol.shape_env))))

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, num_blocks={self.num_blocks})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank along the axis holds the same values."""

    def is_replicate(self) -> bool:
        check_caller("placement")
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Partial(Placement):
    """The value is the reduction, along the axis, of what the ranks hold: "sum", "avg", "min", "max" or "product"."""

    reduce_op: str = "sum"

    def is_partial(self, reduce_op: str | None = None) -> bool:
        check_caller("placement")
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


@dataclass(frozen=True)
class NormPartial(Partial):
    """Each rank holds the norm, of order `order`, of its piece; the value is the norm of those norms."""

    reduce_op: str = "norm"
    order: float = 2.0

    def __repr__(self) -> str:
        return f"NormPartial({self.order:g})"


Placements = tuple[Placement, ...]


def normalized(placements: Any, num_axes: int, num_dims: int) -> Placements:
    """`placements` as a tuple of one per mesh axis, with negative dims counted from the end. None: all Replicate. One
    by itself is that of the only axis.

    Raises ValueError with the rule that is broken.
    """
    if placements is None:
        return (Replicate(),) * num_axes
    is_one = isinstance(placements, Placement) or not hasattr(placements, "__iter__")
    entries = (placements,) if is_one else tuple(placements)
    if len(entries) != num_axes:
        raise ValueError(
            f"{len(entries)} placements {entries} are given for a mesh of {num_axes} axes; give one per axis"
        )
    return tuple(_checked(placement, num_dims) for placement in entries)


def converted(placement: Any) -> Any:
    """A placement of torch's as one of ours; anything else as it is."""
    # Within a graph they are not asked for: Dynamo takes a class for another there.
    if isinstance(placement, Placement) or torch.compiler.is_compiling():
        return placement
    kind = type(placement)
    # To ask torch's own classes would load torch.distributed.tensor, which takes half a second.
    if not kind.__module__.startswith("torch.distributed"):
        return placement
    if kind.__name__ == "Shard":
        return Shard(placement.dim)
    if kind.__name__ == "Partial":
        return Partial(placement.reduce_op)
    return Replicate() if kind.__name__ == "Replicate" else placement


def converted_all(placements: Any) -> Any:
    """`converted` of one, of a sequence, or of a mapping's values; None stays None."""
    if isinstance(placements, Mapping):
        return {name: converted(placement) for name, placement in placements.items()}
    if isinstance(placements, list | tuple):
        return tuple(converted(placement) for placement in placements)
    return converted(placements)


def _checked(placement: Any, num_dims: int) -> Placement:
    if not isinstance(placement, Placement):
        placement = converted(placement)
    if isinstance(placement, Shard | StridedShard):
        if not isinstance(placement.dim, int | torch.SymInt):
            raise ValueError(f"{placement} names a dim that is no number")
        if not -num_dims <= placement.dim < num_dims:
            raise ValueError(f"{placement} names a dim that a tensor of {num_dims} dims does not have")
        return replace(placement, dim=placement.dim % num_dims)
    if not isinstance(placement, Placement):
        kind = type(placement)
        origin = f", but a {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else ""
        raise ValueError(f"{placement!r} is not a placement{origin}; use Shard(dim), Replicate() or Partial()")
    return placement


for _kind in (Placement, Shard, StridedShard, Replicate, Partial):
    _own = [field.name for field in fields(_kind)]
    hold_in_graphs(_kind, ["__eq__", *_own, "cut_dim", "is_partial", "is_replicate", "is_shard"])
