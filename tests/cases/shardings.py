"""One computation on DTensors of many placements, judged by the same one on plain tensors; ranks are threads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.process_group import Call
from disttrain.testing import run_threads
from tests.cases.dtensors import check_parts

MESHES = ((3,), (2, 2), (1, 3))

Assignment = tuple[tuple[Placement, ...], ...]
"""Per operand, a placement per mesh axis."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def check(
    function: Callable[..., Any],
    *operands: torch.Tensor,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    num_choices: int = 6,
    may_be_partial: bool = True,
    gradients: bool = False,
) -> None:
    """Assert that `function` of DTensors has the values that it has of plain tensors, for up to `num_choices` choices
    of placements per mesh; with `gradients`, those of the operands of floats too."""
    expected, wanted_gradients = _evaluated(function, operands, gradients)

    def body(mesh_shape: tuple[int, ...], choices: list[Assignment]) -> None:
        mesh = mesh_of(mesh_shape)
        for choice in choices:
            given = [laid_out(operand, mesh, placements) for operand, placements in zip(operands, choice, strict=True)]
            try:
                results, found_gradients = _evaluated(function, given, gradients)
                _compare(results, expected)
                for place, (found, wanted) in enumerate(zip(found_gradients, wanted_gradients, strict=True)):
                    _compare((found,), (wanted,), note=f"gradient {place}")
            except BaseException as error:
                error.add_note(f"operands lie as {choice}")
                raise

    for mesh_shape in meshes:
        num_ranks = 1
        for axis_size in mesh_shape:
            num_ranks *= axis_size
        run_threads(num_ranks, body, mesh_shape, chosen(operands, len(mesh_shape), num_choices, may_be_partial))


def chosen(
    operands: Sequence[torch.Tensor], num_axes: int, num_choices: int, may_be_partial: bool = True
) -> list[Assignment]:
    """All choices of placements, or as many as are wanted, drawn from a fixed seed."""
    kinds: list[list[tuple[Placement, ...]]] = []
    for operand in operands:
        single: list[Placement] = [Replicate(), *map(Shard, range(operand.ndim))]
        if may_be_partial and operand.is_floating_point():
            single.append(Partial("sum"))
        kinds.append(list(itertools.product(single, repeat=num_axes)))
    num_all = 1
    for kind in kinds:
        num_all *= len(kind)
    if num_all <= num_choices:
        return list(itertools.product(*kinds))
    drawn = random.Random(0)
    return [tuple(drawn.choice(kind) for kind in kinds) for _ in range(num_choices)]


def mesh_of(shape: tuple[int, ...]) -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{axis}" for axis in range(len(shape))))


def laid_out(whole: torch.Tensor, mesh: disttrain.DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`whole` as `placements` say; the parts of a partial one are not zero but on one rank by luck alone."""
    kept = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    tensor = distribute_tensor(whole.detach(), mesh, kept, src_data_rank=None)
    if kept != list(placements):
        tensor = tensor.redistribute(placements=placements)
        noise = distribute_tensor(normal(*whole.shape, seed=9).to(whole.dtype), mesh, kept, src_data_rank=None)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                weight = mesh.get_local_rank(axis) - (mesh.shape[axis] - 1) / 2
                tensor.to_local().add_(noise.to_local() * weight)
    return tensor


def collectives_of(function: Callable[[], Any]) -> list[str]:
    """The names of the collectives that this rank issues during `function`."""
    recorder = _Names()
    disttrain.current_world().add_observer(recorder)
    try:
        function()
    finally:
        disttrain.current_world().remove_observer(recorder)
    return recorder.names


class _Names:
    def __init__(self) -> None:
        self.names: list[str] = []

    def enqueued(self, call: Call) -> None:
        self.names.append(call.operation)

    def completed(self, call: Call, error: object) -> None:
        pass


def _evaluated(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], gradients: bool
) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
    if not gradients:
        results = function(*operands)
        return (tuple(results) if isinstance(results, list | tuple) else (results,)), []
    leaves = [
        operand.detach().requires_grad_(operand.is_floating_point() or operand.is_complex()) for operand in operands
    ]
    results = function(*leaves)
    listed = tuple(results) if isinstance(results, list | tuple) else (results,)
    differentiable = [result for result in listed if result.requires_grad]
    torch.autograd.backward(differentiable, [result.detach().cos() for result in differentiable])
    return tuple(result.detach() for result in listed), [leaf.grad for leaf in leaves]


def _compare(found: Sequence[Any], wanted: Sequence[Any], note: str = "result") -> None:
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not isinstance(other, torch.Tensor):
            assert one == other, f"{note} {place}"
            continue
        try:
            if isinstance(one, DTensor):
                check_parts(one, other)
            else:
                torch.testing.assert_close(one, other, equal_nan=True)
        except AssertionError as error:
            error.add_note(f"{note} {place}")
            raise
