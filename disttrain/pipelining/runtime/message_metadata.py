"""Metadata of a message between stages: how its values are nested, and how large each tensor is.

The receiver must know this before the first byte arrives. The sender tells it once, as msgpack through the store; after
that both sides compare each message with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard
from disttrain.errors import ScheduleError, ShapeError
from disttrain.mesh import DeviceMesh
from disttrain.pipelining._torch import Structure, flatten, structure_from_text, structure_text, unflatten
from disttrain.process_group.calls.packing import pack, unpack

FindMesh = Callable[[tuple[str, ...]], DeviceMesh]
"""The receiver's mesh with these axes."""

_KINDS: dict[str, type[Placement]] = {kind.__name__: kind for kind in (Shard, StridedShard, Replicate, Partial)}


@dataclass(frozen=True)
class DTensorLayout:
    """Placements of a DTensor on its mesh, which on the receiver's side is another one with the same axes."""

    axis_names: tuple[str, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def of_gradient(self) -> tuple[Placement, ...]:
        """The gradient of a sum whose summands the ranks hold is whole on each of them."""
        return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in self.placements)

    def whole(self, part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        return DTensor.from_local(part, mesh, placements, shape=self.shape, stride=self.stride, run_check=False)


@dataclass(frozen=True)
class TensorMetadata:
    """One tensor; of a DTensor `shape` is that of this rank's part, which is what travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool
    sharding: DTensorLayout | None = None

    def __str__(self) -> str:
        cut = "" if self.sharding is None else f" as {self.sharding.placements} on {self.sharding.axis_names}"
        grad = " with a gradient" if self.wants_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{cut}{grad}"


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor: the same for all microbatches."""

    value: Any


@dataclass(frozen=True)
class MessageMetadata:
    """A nest of tensors and constants."""

    structure: Structure
    leaves: tuple[TensorMetadata | Constant, ...]

    @cached_property
    def tensors(self) -> tuple[TensorMetadata, ...]:
        """Those that travel, in the order in which they do."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMetadata))

    def without_grad(self) -> MessageMetadata:
        """The same where nobody asks for gradients."""
        leaves = (replace(leaf, wants_grad=False) if isinstance(leaf, TensorMetadata) else leaf for leaf in self.leaves)
        return MessageMetadata(self.structure, tuple(leaves))

    def check(
        self,
        subject: str,
        actual: MessageMetadata,
        where: str = "in the first microbatch",
        remedy: str = "Give microbatches of one size, or dynamic_shapes=True.",
    ) -> None:
        """Raises: ShapeError when `actual` differs from this one, which was `where`."""
        if actual == self:
            return
        if actual.structure != self.structure:
            raise ShapeError(
                "pipelining.step",
                f"{subject} is nested as {actual.structure}, and was as {self.structure} {where}.",
                remedy,
            )
        was, now = next((old, new) for old, new in zip(self.leaves, actual.leaves, strict=True) if old != new)
        if _differ_in_grad_only(was, now):
            remedy = "What is trained has changed: make the schedule anew."
        raise ShapeError(
            "pipelining.step",
            f"{subject} holds {_leaf_text(now)} where it held {_leaf_text(was)} {where}.",
            remedy,
        )

    def is_of(self, value: Any) -> bool:
        """True where this is one plain tensor, and `value` another of the same shape, dtype and wish for a gradient."""
        meta = self._one_tensor
        if meta is None or meta.sharding is not None or type(value) is not torch.Tensor:
            return False
        return value.shape == meta.shape and value.dtype == meta.dtype and value.requires_grad == meta.wants_grad

    @cached_property
    def _one_tensor(self) -> TensorMetadata | None:
        return self.tensors[0] if self.tensors and self.structure == _ONE else None

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The nest that holds these tensors, each as it lies there."""
        if self._one_tensor is not None:
            return tensors[0]
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorMetadata) else leaf.value for leaf in self.leaves]
        return unflatten(leaves, self.structure)


def metadata_of(value: Any, expected: MessageMetadata | None = None) -> tuple[MessageMetadata, list[torch.Tensor]]:
    """The metadata of a value, `expected` itself where that is it, and the value's tensors."""
    if expected is not None and expected.is_of(value):
        return expected, [value]
    if type(value) is torch.Tensor:
        # What nearly all stages return.
        return MessageMetadata(_ONE, (TensorMetadata(tuple(value.shape), value.dtype, value.requires_grad),)), [value]
    leaves, structure = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return MessageMetadata(structure, tuple(map(_leaf_metadata, leaves))), tensors


def pack_metadata(metadata: MessageMetadata) -> bytes:
    """Raises: ScheduleError for what cannot travel between ranks, which must be plain values and tensors."""
    try:
        return pack([structure_text(metadata.structure), [_packed(leaf) for leaf in metadata.leaves]])
    except (ShapeError, NotImplementedError) as error:
        raise ScheduleError(
            "pipelining.step",
            f"a stage returns what cannot be told to the next one: {error}",
            "Return tensors and plain values in tuples, lists and dicts.",
        ) from error


def unpack_metadata(data: bytes) -> MessageMetadata:
    """The inverse."""
    text, leaves = unpack(data)
    return MessageMetadata(structure_from_text(text), tuple(map(_unpacked, leaves)))


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of this tensor that travels, without gaps."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def received(metadata: TensorMetadata, part: torch.Tensor, find_mesh: FindMesh) -> torch.Tensor:
    """The tensor that a part which has come stands for: a leaf, which wants a gradient where the sender's does."""
    if metadata.sharding is not None:
        part = metadata.sharding.whole(part, find_mesh(metadata.sharding.axis_names), metadata.sharding.placements)
    return part.detach().requires_grad_(metadata.wants_grad)


def gradient_part(metadata: TensorMetadata, grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The gradient of a received tensor as it travels back, as large as that; zeros for None."""
    if grad is None:
        return torch.zeros(metadata.shape, dtype=metadata.dtype, device=like.device)
    if metadata.sharding is not None and isinstance(grad, DTensor):
        grad = grad.redistribute(placements=metadata.sharding.of_gradient)
    return part_of(grad)


def sent_gradient(metadata: TensorMetadata, part: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """The gradient, whose part has come back, of what was returned, on `mesh` if that was a DTensor."""
    if metadata.sharding is None or mesh is None:
        return part
    return metadata.sharding.whole(part, mesh, metadata.sharding.of_gradient)


def _leaf_metadata(leaf: Any) -> TensorMetadata | Constant:
    if not isinstance(leaf, torch.Tensor):
        return Constant(leaf)
    if not isinstance(leaf, DTensor):
        return TensorMetadata(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    mesh = leaf.device_mesh
    sharding = DTensorLayout(
        tuple(mesh.mesh_dim_names or ()), tuple(leaf.placements), tuple(leaf.shape), tuple(leaf.stride())
    )
    return TensorMetadata(tuple(leaf._local_tensor.shape), leaf.dtype, leaf.requires_grad, sharding)


def _differ_in_grad_only(old: TensorMetadata | Constant, new: TensorMetadata | Constant) -> bool:
    return (
        isinstance(old, TensorMetadata)
        and isinstance(new, TensorMetadata)
        and replace(old, wants_grad=new.wants_grad) == new
    )


def _leaf_text(leaf: TensorMetadata | Constant) -> str:
    return str(leaf) if isinstance(leaf, TensorMetadata) else repr(leaf.value)


def _packed(leaf: TensorMetadata | Constant) -> list[Any]:
    if isinstance(leaf, Constant):
        return [leaf.value]
    sharding = leaf.sharding
    cut = sharding and [
        sharding.axis_names,
        [_placement(placement) for placement in sharding.placements],
        sharding.shape,
        sharding.stride,
    ]
    return [leaf.shape, leaf.dtype, leaf.wants_grad, cut]


def _unpacked(packed: list[Any]) -> TensorMetadata | Constant:
    if len(packed) == 1:
        return Constant(packed[0])
    shape, dtype, wants_grad, cut = packed
    if cut is None:
        return TensorMetadata(shape, dtype, wants_grad)
    names, placements, whole, stride = cut
    return TensorMetadata(
        shape,
        dtype,
        wants_grad,
        DTensorLayout(names, tuple(_KINDS[kind](*values) for kind, values in placements), whole, stride),
    )


def _placement(placement: Placement) -> tuple[str, tuple[Any, ...]]:
    return type(placement).__name__, tuple(vars(placement).values())


_ONE = flatten(torch.empty(0))[1]
