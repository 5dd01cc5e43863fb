"""Operators that torch composes of others, and that look beneath them: at memory, or at the caller's handle of a tensor.

A DTensor has no memory of its own, and no subclass is asked about operators that are composed. These few are caught
before they are taken apart; other tensors pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch

from disttrain.dtensor._torch import OpOverload, catch_operator
from disttrain.dtensor.mixed import is_plain

_aten = torch.ops.aten


def _split_at_indices(op: OpOverload, tensor: torch.Tensor, indices: Any, dim: int = 0) -> Any:
    """`tensor_split` reads the indices from memory."""
    return op.decompose(tensor, indices if is_plain(indices) else indices.full_tensor(), dim)


def _rank_into(op: OpOverload, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`matrix_rank` gives its own handle of `out` another tensor, and writes nothing."""
    if all(is_plain(tensor) for tensor in (out, *args, *kwargs.values()) if isinstance(tensor, torch.Tensor)):
        return cast(torch.Tensor, op.decompose(*args, **kwargs, out=out))
    ranks = _WITHOUT_OUT[op](*args, **kwargs)
    return cast(torch.Tensor, _aten.clone.out(ranks, out=out))


_WITHOUT_OUT: Final[dict[OpOverload, OpOverload]] = {
    _aten.linalg_matrix_rank.atol_rtol_float_out: _aten.linalg_matrix_rank.atol_rtol_float,
    _aten.linalg_matrix_rank.atol_rtol_tensor_out: _aten.linalg_matrix_rank.atol_rtol_tensor,
    _aten.linalg_matrix_rank.out: _aten.linalg_matrix_rank.default,
    _aten.linalg_matrix_rank.out_tol_tensor: _aten.linalg_matrix_rank.tol_tensor,
}

_CAUGHT: Final[dict[OpOverload, Callable[..., Any]]] = {
    _aten.tensor_split.tensor_indices_or_sections: _split_at_indices,
    **dict.fromkeys(_WITHOUT_OUT, _rank_into),
}


def catch_all() -> None:
    """To be called once per process."""
    for op, kernel in _CAUGHT.items():
        catch_operator(op, kernel)
