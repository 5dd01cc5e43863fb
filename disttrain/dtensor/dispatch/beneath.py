"""Operators that torch decomposes before a DTensor sees them. Some must be seen as one call.

Some look below the tensor: at its memory, which a DTensor does not have, or at the caller's handle of it. Others create
plain tensors on the way, such as a causal mask. These are the same on all ranks if all operands are. These few are
caught before they are decomposed; calls without DTensors pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch

from disttrain.dtensor._torch import OpOverload, above_autograd, catch_operator, composed
from disttrain.dtensor.dispatch.call_plan import tensors_of
from disttrain.dtensor.dispatch.implicit import composing
from disttrain.dtensor.dispatch.mixed import is_plain, mesh_of
from disttrain.dtensor.gradients.zeros import ZERO_GRADS
from disttrain.dtensor.views.data import count_with

_aten = torch.ops.aten


def _split_at_indices(op: OpOverload, tensor: torch.Tensor, indices: Any, dim: int = 0) -> Any:
    """`tensor_split` reads the indices from memory."""
    return composed(op, tensor, indices if is_plain(indices) else indices.full_tensor(), dim)


def _computed_first(op: OpOverload, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`matrix_rank` makes its own handle of `out` refer to another tensor, and writes nothing to the caller's. `kron`
    writes to `out` reshaped, which is another tensor where it has to move."""
    if all(is_plain(tensor) for tensor in tensors_of([out, *args, *kwargs.values()])):
        return cast(torch.Tensor, composed(op, *args, **kwargs, out=out))
    result = _WITHOUT_OUT[op](*args, **kwargs)
    return cast(torch.Tensor, _aten.clone.out(result, out=out))


def _making_plain_ones(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    tensors = tensors_of([*args, *kwargs.values()])
    if any(is_plain(tensor) for tensor in tensors):
        return composed(op, *args, **kwargs)
    with composing(mesh_of(tensors).world):
        return composed(op, *args, **kwargs)


def _as_a_result(op: OpOverload, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`max_pool1d` is composed, and returns a view, except for plain tensors on CPUs without gradients. A view that is
    made without gradients could not be written to with gradients."""
    if is_plain(tensor) or torch.is_grad_enabled():
        return composed(op, tensor, *args, **kwargs)
    with torch.enable_grad():
        return composed(op, tensor.detach(), *args, **kwargs)


def _pieces(op: OpOverload, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """`unsafe_split` returns pieces that share memory, but autograd counts the writes to each piece separately."""
    pieces = above_autograd(op, tensor, *args, **kwargs)
    if not is_plain(tensor):
        count_with(tensor, pieces)
    return list(pieces)


_WITHOUT_OUT: Final[dict[OpOverload, OpOverload]] = {
    _aten.kron.out: _aten.kron.default,
    _aten.linalg_matrix_rank.atol_rtol_float_out: _aten.linalg_matrix_rank.atol_rtol_float,
    _aten.linalg_matrix_rank.atol_rtol_tensor_out: _aten.linalg_matrix_rank.atol_rtol_tensor,
    _aten.linalg_matrix_rank.out: _aten.linalg_matrix_rank.default,
    _aten.linalg_matrix_rank.out_tol_tensor: _aten.linalg_matrix_rank.tol_tensor,
}

_CAUGHT: Final[dict[OpOverload, Callable[..., Any]]] = {
    _aten.max_pool1d.default: _as_a_result,
    _aten.tensor_split.tensor_indices_or_sections: _split_at_indices,
    _aten.unsafe_split.Tensor: _pieces,
    _aten.unsafe_split_with_sizes.default: _pieces,
    **dict.fromkeys(_WITHOUT_OUT, _computed_first),
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_attention_math.default,
            _aten.combinations.default,
            _aten.istft.default,
            _aten.one_hot.default,
            # While the compiler traces, it is composed in Python, from indices to read.
            _aten._upsample_nearest_exact1d.vec,
            _aten._upsample_nearest_exact2d.vec,
            _aten._upsample_nearest_exact3d.vec,
            _aten.upsample_bicubic2d.vec,
            _aten.upsample_bilinear2d.vec,
            _aten.upsample_linear1d.vec,
            _aten.upsample_nearest1d.vec,
            _aten.upsample_nearest2d.vec,
            _aten.upsample_nearest3d.vec,
            _aten.upsample_trilinear3d.vec,
        ),
        _making_plain_ones,
    ),
}


def catch_all() -> None:
    """To be called once per process."""
    for op, kernel in (*_CAUGHT.items(), *ZERO_GRADS.items()):
        catch_operator(op, kernel)
