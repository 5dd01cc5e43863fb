"""local_map: a function of plain tensors, run on each rank's parts of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from disttrain.dtensor._torch import tree_flatten, tree_unflatten
from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.spec.placement import Placement, converted, normalized
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh

Wanted = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Wanted | tuple[Wanted, ...] = None,
    in_placements: tuple[Wanted, ...] | None = None,
    in_grad_placements: tuple[Wanted, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """`func` for DTensors: it is given this rank's parts, and what it returns is taken for parts.

    Args:    out_placements      the result's, or a tuple with those of each; None for what is no tensor.
             in_placements       per argument, how a DTensor must lie; None: as it does, or it is no DTensor.
             in_grad_placements  per argument, how the gradients of the parts make up the whole's; see `to_local`.
             device_mesh         the results' mesh; default: that of the first DTensor among the arguments.
             redistribute_inputs  lay out the arguments as `in_placements` say, in place of raising.
    Returns: a function with `func`'s arguments; called without any DTensor it is `func`.
    Raises:  LayoutError for arguments and results that don't fit, from the function.
    Collective: where arguments have to be redistributed, over their mesh. Usable as a decorator.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten(args)
        _check_count("in_placements", in_placements, len(flat))
        _check_count("in_grad_placements", in_grad_placements, len(flat))
        mesh = device_mesh
        has_dtensors = False
        for index, value in enumerate(flat):
            if isinstance(value, DTensor):
                has_dtensors = True
                mesh = mesh or value.device_mesh
                wanted = None if in_placements is None else in_placements[index]
                grads = None if in_grad_placements is None else in_grad_placements[index]
                flat[index] = _part(index, value, wanted, grads, redistribute_inputs)
            elif not torch.compiler.is_compiling():
                check_ours("local_map", f"argument {index}", value)
        result = func(*tree_unflatten(flat, tree), **kwargs)
        return _wrapped(result, mesh, out_placements) if has_dtensors and mesh is not None else result

    # A graph has no use for the name, and `super().__call__` no attributes that Dynamo could copy.
    return run if torch.compiler.is_compiling() else functools.update_wrapper(run, func)


def _part(index: int, tensor: DTensor, wanted: Wanted, grads: Wanted, redistributes: bool) -> torch.Tensor:
    if wanted is not None and tuple(wanted) != tensor.placements and _wanted(wanted, tensor) != tensor.placements:
        if not redistributes:
            raise LayoutError(
                "local_map",
                f"argument {index} lies as {list(tensor.placements)}; in_placements want {list(wanted)}.",
                "Redistribute it, or pass redistribute_inputs=True.",
                rank=tensor.device_mesh.get_rank(),
            )
        tensor = tensor.redistribute(placements=wanted)
    return tensor.to_local(grad_placements=grads)


def _wrapped(result: Any, mesh: DeviceMesh, out_placements: Wanted | tuple[Wanted, ...]) -> Any:
    flat, tree = tree_flatten(result)
    per_result = _per_result(out_placements, len(flat))
    for index, (value, placements) in enumerate(zip(flat, per_result, strict=True)):
        if isinstance(value, torch.Tensor) != (placements is not None):
            raise LayoutError(
                "local_map",
                f"result {index} is a {type(value).__name__}, and its out_placements are {placements}.",
                "Give placements for each tensor, and None for every other value.",
                rank=mesh.get_rank(),
            )
        if placements is not None:
            flat[index] = DTensor.from_local(value, mesh, placements)
    return tree_unflatten(flat, tree)


def _wanted(wanted: Sequence[Placement], tensor: DTensor) -> tuple[Placement, ...]:
    """As ours, where torch's are given: not asked in graphs, where ours are compared as they are."""
    return normalized(wanted, tensor.device_mesh.ndim, tensor.ndim)


def _per_result(out_placements: Wanted | tuple[Wanted, ...], num_results: int) -> Sequence[Wanted]:
    is_one = out_placements is None or all(isinstance(converted(entry), Placement) for entry in out_placements)
    per_result = (cast(Wanted, out_placements),) if is_one else cast(tuple[Wanted, ...], out_placements)
    if len(per_result) != num_results:
        raise LayoutError(
            "local_map",
            f"there are {num_results} results and out_placements for {len(per_result)}.",
            "Give a tuple with one entry per result.",
        )
    return per_result


def _check_count(name: str, placements: tuple[Wanted, ...] | None, num_arguments: int) -> None:
    if placements is not None and len(placements) != num_arguments:
        raise LayoutError(
            "local_map",
            f"there are {num_arguments} arguments and {len(placements)} {name}.",
            "Give one entry per argument, nested ones counted each; None for what is no DTensor.",
        )
