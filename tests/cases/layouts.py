"""One computation on DTensors that lie in every way, judged by the same computation on plain tensors."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.testing import run_threads
from tests.cases.dtensors import check_parts


@dataclass(frozen=True)
class Case:
    """`function` of `tensors`; the operands in `fixed` are never partial, as indices are not."""

    name: str
    function: Callable[..., Any]
    tensors: Sequence[torch.Tensor]
    fixed: Sequence[int] = ()
    grads: bool = False
    partials: Sequence[str] = ("sum",)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def check(case: Case, mesh: disttrain.DeviceMesh, max_layouts: int) -> None:
    """Compare `case` on `mesh` with the plain computation, for at most so many combinations of layouts."""
    expected, expected_grads = run(case, [tensor.clone() for tensor in case.tensors])
    for layouts in _sampled(case, mesh, max_layouts):
        try:
            found, grads = run(
                case, [part(whole, layout, mesh) for whole, layout in zip(case.tensors, layouts, strict=True)]
            )
            compare(found, expected)
            compare(grads, expected_grads)
        except Exception as error:
            error.add_note(f"{case.name} of {layouts} on mesh {mesh.shape}")
            raise


def run(case: Case, operands: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor | None]]:
    """What `case` returns, and the operands' gradients; the results' own ones differ from element to element."""
    if not case.grads:
        return case.function(*operands), []
    leaves = [operand.detach().requires_grad_(operand.is_floating_point()) for operand in operands]
    results = case.function(*leaves)
    differentiable = [
        result for result in (results if isinstance(results, list | tuple) else [results]) if result.requires_grad
    ]
    torch.autograd.backward(differentiable, [_gradient(result) for result in differentiable])
    return results, [leaf.grad for leaf in leaves]


def _gradient(result: torch.Tensor) -> torch.Tensor:
    whole = normal(*result.shape, seed=17, dtype=result.dtype)
    if not isinstance(result, DTensor):
        return whole
    return part(
        whole, [Replicate() if place.is_partial() else place for place in result.placements], result.device_mesh
    )


def compare(found: Any, expected: Any) -> None:
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            compare(one, other)
    elif isinstance(found, DTensor):
        assert found.dtype == expected.dtype
        check_parts(found, expected)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert found == expected


def part(whole: torch.Tensor, placements: Sequence[Placement], mesh: disttrain.DeviceMesh) -> DTensor:
    """`whole` laid out; of what is partial, every rank brings something else."""
    layout = Layout(mesh, tuple(placements))
    spec = Spec.of(layout, tuple(whole.shape), whole.dtype)
    cut = layout.with_placements([Replicate() if place.is_partial() else place for place in placements])
    local = redistribute_local(whole, spec.with_layout(layout.replicated()), cut).clone()
    for axis, place in enumerate(placements):
        if isinstance(place, Partial):
            position, size = mesh.get_local_rank(axis), mesh.shape[axis]
            # Above zero on one rank, below on the next; the last one makes up for the others.
            share = (position + 1) * (-1) ** position
            total = sum((other + 1) * (-1) ** other for other in range(size - 1))
            match place.reduce_op:
                case "sum":
                    local = torch.full_like(local, share) if position < size - 1 else local - total
                case "product":
                    local = torch.full_like(local, 2) if position < size - 1 else local / 2 ** (size - 1)
                case "max":
                    local = local if position == size - 1 else local - abs(share)
                case "min":
                    local = local if position == size - 1 else local + abs(share)
    return DTensor(local, spec)


def _sampled(case: Case, mesh: disttrain.DeviceMesh, max_layouts: int) -> list[tuple[tuple[Placement, ...], ...]]:
    choices = []
    for place, whole in enumerate(case.tensors):
        along_axis: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(whole.ndim))]
        if place not in case.fixed and (whole.is_floating_point() or whole.dtype == torch.int64):
            along_axis += [Partial(op) for op in case.partials]
        # Different reductions along two axes depend on their order.
        choices.append(
            [
                layout
                for layout in itertools.product(along_axis, repeat=mesh.ndim)
                if len({place for place in layout if place.is_partial()}) < 2
            ]
        )
    everything = list(itertools.product(*choices))
    if len(everything) <= max_layouts:
        return everything
    return random.Random(case.name).sample(everything, max_layouts)


def right(cases: Sequence[Case], mesh_shape: Sequence[int], max_layouts: int) -> None:
    """Assert on every rank, as threads, that all of `cases` are right in up to `max_layouts` combinations each."""
    with warnings.catch_warnings():
        # Gathering is announced; how much is gathered is for other tests.
        warnings.filterwarnings("ignore", message=r".*has no sharding rule; its operands are gathered")
        warnings.filterwarnings("ignore", message=r"index_reduce\(\) is in beta")
        run_threads(math.prod(mesh_shape), _check_all, cases, mesh_shape, max_layouts)


def _check_all(cases: Sequence[Case], mesh_shape: Sequence[int], max_layouts: int) -> None:
    mesh = disttrain.init_device_mesh("cpu", tuple(mesh_shape))
    for case in cases:
        check(case, mesh, max_layouts)
