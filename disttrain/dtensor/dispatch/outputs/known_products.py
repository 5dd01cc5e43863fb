"""Results of products of matrices and vectors, by formulas, as in `known_results.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.outputs.known_pointwise import Result
from disttrain.dtensor.dispatch.outputs.known_shapes import Shape, fits

Results = Sequence[Result] | None


def _are_alike(*operands: torch.Tensor) -> bool:
    return operands[0].dtype.is_floating_point and all(each.dtype is operands[0].dtype for each in operands)


def _matrix_vector(matrix: torch.Tensor, vector: torch.Tensor) -> Results:
    if matrix.ndim != 2 or vector.ndim != 1 or matrix.shape[1] != vector.shape[0] or not _are_alike(matrix, vector):
        return None
    return [((matrix.shape[0],), matrix.dtype)]


def _inner(first: torch.Tensor, second: torch.Tensor) -> Results:
    is_right = first.ndim == second.ndim == 1 and first.shape == second.shape and _are_alike(first, second)
    return [((), first.dtype)] if is_right else None


def _products(left: torch.Tensor, right: torch.Tensor) -> Shape | None:
    if left.ndim != 3 or right.ndim != 3 or left.shape[0] != right.shape[0] or left.shape[2] != right.shape[1]:
        return None
    return (left.shape[0], left.shape[1], right.shape[2]) if _are_alike(left, right) else None


def _added(added: torch.Tensor, shape: Shape | None, *factors: torch.Tensor) -> Results:
    is_right = shape is not None and _are_alike(added, *factors) and added.ndim <= len(shape)
    return [(shape, added.dtype)] if is_right and shape is not None and fits(tuple(added.shape), shape) else None


def _added_products(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Results:
    return _added(added, _products(left, right), left, right)


def _added_sum(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Results:
    """A sum of products over the batch."""
    shape = _products(left, right)
    return _added(added, shape and shape[1:], left, right)


def _added_vector(
    added: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Results:
    results = _matrix_vector(matrix, vector)
    return _added(added, results[0][0] if results else None, matrix, vector)


def _added_outer(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Results:
    if left.ndim != 1 or right.ndim != 1 or 1 in (*left.shape, *right.shape):
        return None
    return _added(added, (left.shape[0], right.shape[0]), left, right)


def _added_product(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Results:
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        return None
    return _added(added, (left.shape[0], right.shape[1]), left, right)


_ATEN: Final = torch.ops.aten
PRODUCTS: Final[dict[OpOverload, Callable[..., Results]]] = {
    _ATEN.mv.default: _matrix_vector,
    _ATEN.dot.default: _inner,
    _ATEN.vdot.default: _inner,
    _ATEN.addmm.default: _added_product,
    _ATEN.baddbmm.default: _added_products,
    _ATEN.addbmm.default: _added_sum,
    _ATEN.addmv.default: _added_vector,
    _ATEN.addr.default: _added_outer,
}
