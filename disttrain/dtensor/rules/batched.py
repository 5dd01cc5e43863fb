"""Operators on the last dims of their operands, which stay whole: the dims before them are a batch and may be cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from disttrain.dtensor.rules.axis_map import (
    BATCH_LETTERS,
    UNCUT,
    AxisMap,
    aligned_letters,
    guarded,
    operand_names,
    signatures_of,
    with_arguments,
    zeros_where_empty,
)
from disttrain.dtensor.rules.base import Compute, OpCall, Propagation, Rule, broadcast_shape, result_specs

_LINEAR_ALGEBRA = (
    "_linalg_det",
    "_linalg_eigh",
    "_linalg_eigvals",
    "_linalg_slogdet",
    "_linalg_solve_ex",
    "_linalg_svd",
    "_cdist_backward",
    "cholesky_inverse",
    "cholesky_solve",
    "linalg_cholesky_ex",
    "linalg_eig",
    "linalg_inv_ex",
    "linalg_ldl_factor_ex",
    "linalg_lu",
    "linalg_lu_factor_ex",
    "linalg_matrix_exp",
    "linalg_qr",
    "linalg_solve_triangular",
    "triangular_solve",
)
"""Matrices throughout."""

_PLANES = {
    "_adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool2d_backward": 2,
    "_adaptive_avg_pool3d": 3,
    "_adaptive_avg_pool3d_backward": 3,
    "_upsample_bicubic2d_aa": 2,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
    "avg_pool1d": 1,
    "avg_pool2d": 2,
    "avg_pool2d_backward": 2,
    "avg_pool3d": 3,
    "avg_pool3d_backward": 3,
    "pixel_shuffle": 3,
    "pixel_unshuffle": 3,
    "reflection_pad1d": 1,
    "reflection_pad1d_backward": 1,
    "reflection_pad2d": 2,
    "reflection_pad2d_backward": 2,
    "reflection_pad3d": 3,
    "reflection_pad3d_backward": 3,
    "replication_pad1d": 1,
    "replication_pad1d_backward": 1,
    "replication_pad2d": 2,
    "replication_pad2d_backward": 2,
    "replication_pad3d": 3,
    "replication_pad3d_backward": 3,
    "upsample_bicubic2d": 2,
    "upsample_bilinear2d": 2,
    "upsample_linear1d": 1,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "upsample_trilinear3d": 3,
}
"""Linear in the first operand (an operand called `self` beside a gradient gives its shape alone)."""

_SELECTIONS = {
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool2d_backward": 2,
    "adaptive_max_pool3d": 3,
    "adaptive_max_pool3d_backward": 3,
    "max_pool2d_with_indices": 2,
    "max_pool2d_with_indices_backward": 2,
    "max_pool3d_with_indices": 3,
    "max_pool3d_with_indices_backward": 3,
    "max_unpool2d": 2,
    "max_unpool3d": 3,
}
"""Indices count within a plane, so no cut of batch or channels changes them."""

_NUM_CORE_DIMS: Mapping[str, int | tuple[int, ...]] = {
    **dict.fromkeys(_LINEAR_ALGEBRA, 2),
    **_PLANES,
    **_SELECTIONS,
    "col2im": 2,
    "grid_sampler_2d": 3,
    "grid_sampler_2d_backward": 3,
    "grid_sampler_3d": 4,
    "grid_sampler_3d_backward": 4,
    "geqrf": 2,
    "im2col": 3,
    "linalg_householder_product": (2, 1),
    "linalg_ldl_solve": (2, 1, 2),
    "linalg_lu_solve": (2, 1, 2),
    "linalg_pinv": (2, 0, 0),
    "lu_unpack": (2, 1),
    "ormqr": (2, 1, 2),
}
"""The number of last dims that stay whole: of every operand, or of each."""


def batched(call: OpCall) -> AxisMap | None:
    """Dims before the core ones, aligned from the right as in broadcasting, if every result begins with them."""
    name = call.facts.name.removeprefix("aten.")
    cores = _core_dims(call, name)
    # A rank that finds a singular matrix would raise alone.
    if cores is None or call.argument("check_errors", False):
        return None
    names = operand_names(call)
    shapes = [
        () if spec is None else spec.shape[: len(spec.shape) - core]
        for spec, core in zip(call.operands, cores, strict=True)
    ]
    batch = broadcast_shape(*shapes)
    if any(tuple(output.shape[: len(batch)]) != batch for output in call.outputs if not _is_nothing(output)):
        return None
    letters = BATCH_LETTERS[: len(batch)]
    operands = {
        operand: aligned_letters(letters, shape, batch) + UNCUT * core
        for operand, shape, core in zip(names, shapes, cores, strict=True)
    }
    results = tuple(
        UNCUT if _is_nothing(output) else letters + UNCUT * (output.ndim - len(batch)) for output in call.outputs
    )
    nothing = tuple(frozenset() if _is_nothing(output) else frozenset(names) for output in call.outputs)
    return AxisMap(
        operands, results, letters, sources=nothing, linear=(frozenset({names[0]}),) if _is_linear(name) else ()
    )


def fourier(call: OpCall) -> AxisMap:
    """Any dim may be cut along which nothing is transformed."""
    num_dims = len(call.operand.shape)
    transformed = {dim % num_dims for dim in call.argument("dim")}
    letters = "".join(UNCUT if dim in transformed else BATCH_LETTERS[dim] for dim in range(num_dims))
    return AxisMap({"self": letters}, (letters,), letters.replace(UNCUT, ""), linear=(frozenset({"self"}),))


def cross(call: OpCall) -> AxisMap:
    """Products of vectors along one dim."""
    num_dims = len(call.output_shape)
    along = call.argument("dim", -1) % num_dims
    letters = "".join(UNCUT if dim == along else BATCH_LETTERS[dim] for dim in range(num_dims))
    names = operand_names(call)
    operands = {
        name: aligned_letters(letters, () if spec is None else spec.shape, call.output_shape)
        for name, spec in zip(names, call.operands, strict=True)
    }
    linear = tuple(frozenset({name}) for name in names)
    return AxisMap(operands, (letters,), letters.replace(UNCUT, ""), linear=linear)


def _core_dims(call: OpCall, name: str) -> list[int] | None:
    core = _NUM_CORE_DIMS[name.removesuffix("_backward")] if "upsample" in name else _NUM_CORE_DIMS[name]
    cores = [core] * len(call.operands) if isinstance(core, int) else list(core[: len(call.operands)])
    if name == "_linalg_solve_ex" and len(call.output_shape) < len(call.operand.shape):
        cores = [2, 1]
    fits = len(cores) == len(call.operands) and all(
        spec is None or len(spec.shape) >= core for spec, core in zip(call.operands, cores, strict=True)
    )
    return cores if fits else None


def _is_nothing(output: torch.Tensor) -> bool:
    """True for a result that was not asked for."""
    return tuple(output.shape) == (0,)


def _is_linear(name: str) -> bool:
    # With one operand or a gradient in front: the others say where, or how large.
    return (
        name.removesuffix("_backward") in _PLANES
        or name in ("col2im", "im2col")
        or (name in _SELECTIONS and name.endswith("_backward"))
    )


def _with_local_size(call: OpCall, propagation: Propagation) -> Compute:
    """The backward of an upsampling, which is told the size of its result."""
    (result,) = result_specs(call, propagation)
    return guarded(call, propagation, with_arguments(call, {"input_size": list(result.local_shape)}))


def _whole(call: OpCall) -> None:
    """An operator that raises or not by all values: on whole operands every rank does alike."""


RULES = {
    **{f"aten.{name}": Rule(signatures_of(batched), zeros_where_empty) for name in _NUM_CORE_DIMS},
    **{
        f"aten.{name}": Rule(signatures_of(batched), zeros_where_empty, goes_by_layout=True)
        for name in (*_PLANES, *_SELECTIONS)
    },
    **{
        f"aten.{name}_backward": Rule(signatures_of(batched), _with_local_size)
        for name in _PLANES
        if "upsample" in name
    },
    "aten._fft_c2c": Rule(signatures_of(fourier), zeros_where_empty),
    "aten._fft_c2r": Rule(signatures_of(fourier), zeros_where_empty),
    "aten._fft_r2c": Rule(signatures_of(fourier), zeros_where_empty),
    "aten._linalg_check_errors": Rule(signatures_of(_whole)),
    "aten.linalg_cross": Rule(signatures_of(cross), zeros_where_empty),
}
