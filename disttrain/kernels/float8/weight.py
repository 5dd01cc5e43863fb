"""A weight that was gathered in float8: the tensor that modules see between the gather and the product.

Each rank casts its rows with its own scale, which is gathered with them. So ranks need not agree before, and need not
know when an optimizer has stepped. Scales are powers of two, so the product brings all rows to one scale without
rounding again, except values that are too small for the format then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import torch

from disttrain.errors import LayoutError
from disttrain.kernels._torch import make_wrapper, map_tensors, without_torch_function
from disttrain.kernels.float8.operator import cast
from disttrain.kernels.float8.shards import cast_shards
from disttrain.kernels.float8.shards_reference import Shard
from disttrain.process_group._torch import dispatches

WEIGHT_DTYPE: Final = torch.float8_e4m3fn

_SAME: Final = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}
"""Operators that return the weight itself; a view where it has the same shape."""


@dispatches
class Float8Weight(torch.Tensor):
    """`codes` (N, K) in float8 with `scales`, each for `rows_per_scale` rows; to others a matrix of `dtype`.

    What is computed with it otherwise than by a float8 linear layer is computed with its values.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows_per_scale: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, rows_per_scale: int, dtype: torch.dtype) -> Self:
        return make_wrapper(  # type: ignore[no-any-return]
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, rows_per_scale: int, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.rows_per_scale = codes, scales, rows_per_scale

    __torch_function__ = without_torch_function

    def __repr__(self) -> str:  # type: ignore[override]  # a compiler asks, where there are no values yet
        return f"Float8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def values(self) -> torch.Tensor:
        """The weight that the codes stand for, (N, K) of `dtype`."""
        factors = self.scales.repeat_interleave(self.rows_per_scale)[: len(self.codes), None]
        return (self.codes.float() * factors).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.rows_per_scale, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: Any, *_: Any) -> Float8Weight:
        return Float8Weight(inner["codes"], inner["scales"], *meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs leave out that it is a class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], Float8Weight):
            problem = "a weight that was gathered in float8 is to be written to."
            raise LayoutError(str(func), problem, "Write to the shards; they are in the parameter's own dtype.")
        # torch notes of a view whose it is, and cannot where the view was made in inference mode.
        with torch.inference_mode(torch.is_inference_mode_enabled() and not func.is_view):
            if func in _SAME and (len(args) == 1 or tuple(args[1]) == tuple(args[0].shape)):
                weight: Float8Weight = args[0]
                return Float8Weight(weight.codes, weight.scales, weight.rows_per_scale, weight.dtype)
            values = map_tensors(Float8Weight, Float8Weight.values, (args, kwargs or {}))
            return func(*values[0], **values[1])


class Float8Gather:
    """Hooks of `fully_shard` for a weight: what of its shard to gather, and what to make of that."""

    def __init__(self, by_rows: bool) -> None:
        self.by_rows = by_rows

    def fsdp_pre_all_gather(
        self, shard: torch.Tensor, mesh: Any, outer_size: torch.Size, *_: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The rows of this rank in float8, and their scales; the same sizes on all ranks."""
        num_rows = -(-outer_size[0] // mesh.size())
        shard_cast = cast(shard, WEIGHT_DTYPE, by_rows=self.by_rows, wants_columns=False)
        scales = shard_cast.row_scales
        if self.by_rows and len(scales) < num_rows:
            scales = torch.nn.functional.pad(scales, (0, num_rows - len(scales)), value=1.0)
        return (shard_cast.rows, scales), (1 if self.by_rows else num_rows, outer_size[0])

    def fsdp_pre_all_gather_together(
        self,
        hooks: Sequence[Float8Gather],
        shards: Sequence[torch.Tensor],
        mesh: Any,
        outer_sizes: Sequence[torch.Size],
    ) -> tuple[Sequence[Any], Sequence[Any], Callable[..., None]]:
        """The same of all weights of a group, cast by two launches right into what is sent."""
        rows = [-(-size[0] // mesh.size()) for size in outer_sizes]
        each = [*zip(hooks, shards, rows, strict=True)]
        kinds = [
            (
                (torch.Size((num_rows, shard.shape[1])), WEIGHT_DTYPE),
                (torch.Size((num_rows if hook.by_rows else 1,)), torch.float32),
            )
            for hook, shard, num_rows in each
        ]
        metadata = [
            (1 if hook.by_rows else num_rows, size[0])
            for (hook, _, num_rows), size in zip(each, outer_sizes, strict=True)
        ]

        def write(sent: torch.Tensor, starts: Sequence[int]) -> None:
            for by_rows in {hook.by_rows for hook in hooks}:
                chosen = [
                    Shard(shard, num_rows, codes_start, scales_start)
                    for (hook, shard, num_rows), codes_start, scales_start in zip(
                        each, starts[::2], starts[1::2], strict=True
                    )
                    if hook.by_rows == by_rows
                ]
                cast_shards(chosen, sent, WEIGHT_DTYPE, by_rows=by_rows)

        return kinds, metadata, write

    def fsdp_post_all_gather(
        self,
        shard: torch.Tensor,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The weight, whose memory the outputs are; made once, it shows what they are filled with."""
        if out is not None:
            return None
        codes, scales = outputs
        rows_per_scale, num_rows = metadata
        # `.data` has a version of its own, which filling the outputs again leaves alone.
        weight = Float8Weight(codes.data[:num_rows], scales.data, rows_per_scale, dtype)
        return weight, (codes, scales)
