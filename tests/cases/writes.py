"""Every operator of torch's that writes to its first operand, with arguments made of its schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement
from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.spec.placement import NormPartial

KINDS: tuple[Partial, ...] = (
    *map(Partial, ("sum", "avg", "product", "max", "min")),
    *(NormPartial(order=order) for order in (0.5, 1.0, 2.0, 3.0, float("inf"))),
)

_OTHERS = frozenset(
    {
        "_amp_update_scale_",
        "_index_put_impl_",
        "_resize_output_",
        "_sobol_engine_ff_",
        "_sobol_engine_initialize_state_",
        "_sobol_engine_scramble_",
        "alpha_dropout_",
        "as_strided_",
        "bernoulli_",
        "cauchy_",
        "coalesce",
        "copy_sparse_to_sparse_",
        "detach_",
        "dropout_",
        "exponential_",
        "feature_alpha_dropout_",
        "feature_dropout_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "rename_",
        "requires_grad_",
        "resize",
        "resize_",
        "resize_as_",
        "resize_as_sparse_",
        "retain_grad",
        "rrelu_",
        "rrelu_with_noise_",
        "set",
        "set_",
        "set_data",
        "sparse_resize_",
        "sparse_resize_and_clear_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "uniform_",
        "unsqueeze_",
    }
)
"""Operators that change a tensor's form, draw numbers, or work on tensors of other kinds."""


def writing_operators() -> Iterator[OpOverload]:
    """By torch's table, in order, those that write to a tensor, or to a list, and take what `arguments` makes."""
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "aten::" in name}
    for name in sorted(names - _OTHERS):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None and not name.startswith("_fused_") else ():
            op = getattr(packet, overload)
            first = op._schema.arguments[0] if op._schema.arguments else None
            writes = first is not None and first.alias_info is not None and first.alias_info.is_write
            if writes and str(first.type) in ("Tensor", "List[Tensor]") and not first.is_out:
                yield op


def arguments(op: OpOverload, whole: torch.Tensor) -> tuple[list[Any], dict[str, Any]] | None:
    """What `op` may be given to write to `whole`, of shape (4, 3); None where nothing here fits it."""
    is_list = str(op._schema.arguments[0].type) == "List[Tensor]"
    values: list[Any] = [[whole] if is_list else whole]
    keywords = {}
    for place, argument in enumerate(op._schema.arguments[1:], 1):
        if argument.kwarg_only and argument.has_default_value():
            continue
        value = _value(op._schema.name.removeprefix("aten::"), argument, whole, place)
        if value is _NOTHING:
            return None
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            values.append(value)
    return values, keywords


_NOTHING = object()
_NAMED: dict[str, Any] = {
    "condition": torch.tensor([[True, False, True]] * 4),
    "decimals": 1,
    "dim": 0,
    "dtype": None,
    "found_inf": torch.zeros(1),
    "inv_scale": torch.full((1,), 0.5),
    "mask": torch.tensor([[True, False, True]] * 4),
    "maxnorm": 0.5,
    "n": 1,
    "p": 1,
    "rounding_mode": "floor",
}
_SHAPES = {
    ("addbmm_", "batch1"): (2, 4, 2),
    ("addbmm_", "batch2"): (2, 2, 3),
    ("addmm_", "mat1"): (4, 2),
    ("addmm_", "mat2"): (2, 3),
    ("addr_", "vec1"): (4,),
    ("addr_", "vec2"): (3,),
}
_BY_TYPE: dict[str, Any] = {
    "List[Optional[Tensor]]": [torch.tensor([1, 0])],
    "List[int]": [0],
    "List[number]": [-1.5],
    "bool": False,
    "float": -1.5,
    "int": 1,
    "number": -1.5,
    "Optional[number]": -0.5,
    "Optional[float]": 0.25,
}


def _value(name: str, argument: Any, whole: torch.Tensor, place: int) -> Any:
    kind = str(argument.type)
    if argument.name == "index":
        return _index(name)
    if argument.name == "reduce":
        return "amax" if name == "index_reduce_" else "sum" if name == "scatter_reduce_" else "add"
    if argument.name in ("value", "tensor") and kind == "Tensor" and ("fill" in name or name.startswith("_foreach")):
        return torch.tensor(-1.5, dtype=whole.dtype)
    if argument.name == "scalars":
        return torch.tensor([-1.5], dtype=whole.dtype) if kind == "Tensor" else [-1.5]
    if argument.name in _NAMED and not (argument.name == "p" and kind == "Tensor"):
        return _NAMED[argument.name]
    if kind in ("Tensor", "Optional[Tensor]", "List[Tensor]"):
        shape = _SHAPES.get((name, argument.name), tuple(whole.shape))
        tensor = torch.rand(shape, generator=torch.Generator().manual_seed(place), dtype=whole.dtype) + 0.5
        return [tensor] if kind == "List[Tensor]" else tensor
    return _BY_TYPE.get(kind, _NOTHING)


def _index(name: str) -> torch.Tensor:
    if "scatter" in name:
        return torch.tensor([[1, 0, 2], [2, 2, 0], [0, 1, 3], [3, 3, 1]])
    if name == "put_":
        return torch.arange(12).flip(0).view(4, 3)
    return torch.tensor([1, 0]) if name == "index_fill_" else torch.tensor([1, 0, 3, 2])


def in_parts(
    whole: torch.Tensor, kind: Partial, mesh: disttrain.DeviceMesh, placements: Sequence[Placement] = ()
) -> DTensor:
    """`whole`, partial as `kind` says along the mesh's axis, or as `placements` say; each rank has something else."""
    laid = tuple(placements) or (kind,)
    local = whole
    for axis, placement in enumerate(laid):
        if placement.cut_dim is not None:
            parts = local.tensor_split(mesh.shape[axis], placement.cut_dim)
            local = parts[mesh.get_local_rank(axis)]
    for axis, placement in enumerate(laid):
        if placement == kind:
            local = _part(local, kind, mesh.get_local_rank(axis), mesh.shape[axis])
    return DTensor.from_local(local.clone(), mesh, laid)


def _part(whole: torch.Tensor, kind: Partial, position: int, num_ranks: int) -> torch.Tensor:
    if isinstance(kind, NormPartial):
        if kind.order == float("inf"):
            return whole.clone() if position == num_ranks - 1 else whole / 2
        return whole * ((position + 1) / sum(range(1, num_ranks + 1))) ** (1 / kind.order)
    match kind.reduce_op:
        case "sum" | "avg":
            last = 1 - sum(2 - 3 * other for other in range(num_ranks - 1))
            share = 2 - 3 * position if position < num_ranks - 1 else last
            return whole * share * (num_ranks if kind.reduce_op == "avg" else 1)
        case "product" if num_ranks > 1:
            return whole * 4 if position == 0 else torch.full_like(whole, 0.25 if position == 1 else 1)
    own = torch.arange(whole.numel()).reshape(whole.shape) % num_ranks == position
    return torch.where(own, whole, whole + (1 + position) * (-1 if kind.reduce_op == "max" else 1))
