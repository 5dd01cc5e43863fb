"""Answers to the compiler about DTensors: how to take one apart and put it together, and what a graph may hold.

A graph works on parts. Each layout has graphs of its own, and one graph serves all sizes that lie so: the layout is
what the compiler compares, and sizes are its symbols. Docs: docs/decisions/014-graphs-stand-on-comparisons.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch

from disttrain.dtensor._torch import is_kept_for_later, refuse_caching
from disttrain.dtensor.spec.checked_layouts import gradient_placements
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.shard_sizes import strides_of_whole
from disttrain.errors import LayoutError

_STRIDES_ARE_UNSURE = torch.__version__ < "2.13"


class Traced:
    """The part of DTensor that torch.compile, and torch.utils.swap_tensors, call."""

    _local_tensor: torch.Tensor
    _spec: Spec

    def __tensor_flatten__(self) -> tuple[list[str], Layout]:
        layout = self._spec.layout
        # What a graph returns lies in one way: the layout cannot depend on the sizes of a call.
        return ["_local_tensor"], layout.concrete() if layout.is_symbolic and is_kept_for_later() else layout

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], layout: Layout, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> Self:
        local = inner["_local_tensor"]
        spec = Spec(layout, tuple(outer_size), tuple(outer_stride), local.dtype)
        if _STRIDES_ARE_UNSURE and not spec.is_symbolic:
            strides = strides_of_whole(spec.shape, spec.stride, local.shape, local.stride())
            spec = Spec(layout, spec.shape, strides, local.dtype)
        if spec.is_symbolic and spec.local_shape != tuple(local.shape):
            # It is, and to have asked tells the compiler how its symbols for the part and for the whole go together.
            # But AOTAutograd (torch 2.13) looks in the wrong places for the sizes of what a graph returns where its
            # backward pass, traced after it has counted them, turns a symbol into a number. No rule of ours does.
            raise LayoutError(
                "torch.compile",
                f"a part of shape {tuple(local.shape)} came for {spec!r}: backward asks for a size as a number.",
                "Keep that dim out of dynamic shapes: torch._dynamo.mark_static(tensor, dim), or dynamic=False.",
            )
        return cast(Any, cls)(local, spec)  # type: ignore[no-any-return]

    def _stable_hash_for_caching(self) -> str:
        refuse_caching("a traced DTensor knows this process's place on its mesh")

    def __coerce_tangent_metadata__(self) -> Any:
        """This as the gradient of a tensor that lies so, which a backward pass is traced with."""
        return cast(Any, self).redistribute(placements=gradient_placements(self._spec.placements))

    def __coerce_same_metadata_as_tangent__(self, layout: Layout, expected_type: type | None = None) -> Any:
        """This gradient as the backward pass was traced with; None where it was traced with a plain tensor."""
        return None if expected_type is not None else cast(Any, self).redistribute(layout.mesh, layout.placements)
