"""torch's names for context parallel: a block in which buffers are cut, and attention looks across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from disttrain.context_parallel.attending import attending
from disttrain.context_parallel.buffers import NAME, Buffers, cut_in_place, read_buffers
from disttrain.context_parallel.gathering import gathered
from disttrain.context_parallel.ranks import alike, check_axis
from disttrain.errors import SettingError
from disttrain.kernels.attention.context.current import current_cut
from disttrain.kernels.attention.context.parts import Parts, mirrored
from disttrain.mesh import DeviceMesh

_WAYS: Final[dict[str, str | None]] = {"allgather": "gather", "alltoall": "ring"}


class _Method:
    """The way that `set_rotate_method` has asked for; None: by cost."""

    way: str | None = None


_METHOD: Final = _Method()


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Cuts buffers along positions, and has a model's attention look across the ranks of `mesh`, within the block.

        with context_parallel(mesh["cp"], buffers=[tokens, targets, positions], buffer_seq_dims=[1, 1, 1]):
            F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten()).backward()

    A model that calls F.scaled_dot_product_attention, causal or without a mask, runs unchanged, a model of transformers
    too; keep backward within the block. Each rank has two runs of positions, one from the front and one from behind, so
    that causal attention is equal work. Any length will do.

    Args:    mesh                an axis, as mesh["cp"]; its ranks have the same buffers.
             buffers             tensors with a dim of positions, all of one length: inputs, targets, positions, tables
                                 of angles. Within the block they are this rank's part. Tables whose positions are
                                 their dim 0 may be longer than the first buffer, as torch's may.
             buffer_seq_dims     for each its dim of positions.
             no_restore_buffers  those of them that need not be whole again behind it.
    Raises:  on all ranks where one has what cannot be cut (ArgumentError, ShapeError; RankMismatchError on the others),
             and where lengths differ; LayoutError within for a mask in memory, and for dropout.
    Collective: a few bytes to enter; within, attention.
    """
    axis = check_axis(NAME, mesh)

    def read() -> tuple[Buffers, list[int]]:
        checked = read_buffers(NAME, buffers or [], buffer_seq_dims or [], no_restore_buffers or (), axis.get_rank())
        return checked, [len(checked.tensors), checked.length]

    checked = alike(NAME, axis, ("the number of buffers", "their length"), read)
    parts = mirrored(checked.length, axis.size())
    with cut_in_place(checked, parts, axis.get_local_rank()), attending(parts, axis, _METHOD.way):
        yield


@torch.no_grad()
def context_parallel_unshard(mesh: DeviceMesh, buffers: list[torch.Tensor], seq_dims: list[int]) -> list[torch.Tensor]:
    """Gathers tensors that are cut along positions, such as logits: whole ones, on all ranks, without a gradient.

    Args:   buffers, seq_dims  this rank's parts, all of as many positions, and for each its dim of positions. They are
                               cut as in the block that is running, else as `context_parallel` cuts.
    Raises: on all ranks where parts don't fit together.
    Collective: a gather for each.
    """
    operation = "context_parallel_unshard"
    axis = check_axis(operation, mesh)

    def read() -> tuple[Buffers, list[int]]:
        checked = read_buffers(operation, buffers, seq_dims, (), axis.get_rank(), may_be_parts=True)
        return checked, [len(checked.tensors)]

    checked = alike(operation, axis, ("the number of buffers",), read)
    cut = current_cut()
    parts: Parts | None = cut.parts if cut is not None and cut.axis == axis else None
    return gathered(operation, axis, parts, checked.tensors, checked.dims)


def set_rotate_method(rotate_method: str) -> None:
    """Sets how keys and values come to the ranks in blocks of `context_parallel`: "alltoall", round in a ring, or
    "allgather", all at once. Without a call the cheaper one is taken."""
    if rotate_method not in _WAYS:
        methods = " or ".join(map(repr, _WAYS))
        raise SettingError("set_rotate_method", f"there is no method {rotate_method!r}.", f"Give {methods}.")
    _METHOD.way = _WAYS[rotate_method]
