"""DTensors of any layout, and the comparison of what is computed with them to the same on plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import disttrain
from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.mesh import DeviceMesh


def counted(*shape: int, dtype: torch.dtype = torch.float64, start: int = 1) -> torch.Tensor:
    """Different whole numbers, so that sums of parts are exact."""
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape).to(dtype)


def laid(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of value `whole`, the same on all ranks. Parts of a partial one differ from rank to rank."""
    part = whole.clone()
    # Of several axes the first is reduced first, so it is the last to be taken apart.
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, Partial):
            part = _partial(part, placement.reduce_op, mesh.get_local_rank(axis), mesh.shape[axis])
    begin = [placement if placement.is_partial() else Replicate() for placement in placements]
    return DTensor.from_local(part, mesh, begin, shape=whole.shape, stride=whole.stride()).redistribute(
        placements=placements
    )


def _partial(whole: torch.Tensor, reduce_op: str, position: int, axis_size: int) -> torch.Tensor:
    if reduce_op in ("sum", "avg"):
        share = position + 2 if position else 1 - sum(range(3, axis_size + 2))
        return whole * share * (axis_size if reduce_op == "avg" else 1)
    if reduce_op == "product":
        return torch.full_like(whole, 2.0) if position else whole * 0.5 ** (axis_size - 1)
    own = torch.arange(whole.numel()).reshape(whole.shape) % axis_size == position
    return torch.where(own, whole, whole + (1 + position) * {"max": -1, "min": 1}[reduce_op])


def placements_of(mesh: DeviceMesh, num_dims: int, partials: Iterable[str] = ("sum",)) -> list[tuple[Placement, ...]]:
    """All placements of a tensor of `num_dims` dims, with one kind of Partial at a time."""
    found: dict[tuple[Placement, ...], None] = {}
    for reduce_op in partials or ("",):
        kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(num_dims))]
        if reduce_op:
            kinds.append(Partial(reduce_op))
        found.update(dict.fromkeys(itertools.product(kinds, repeat=mesh.ndim)))
    return list(found)


def check_same(
    function: Callable[..., Any],
    wholes: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    layouts: Sequence[Sequence[Placement]],
    *,
    with_gradients: bool = True,
) -> Any:
    """`function` of DTensors laid out so is `function` of whole tensors, and so are its gradients; twice, since the
    second call takes another way. Returns: the DTensor results."""
    expected = _as_list(function(*[whole.clone() for whole in wholes]))
    note = f"layouts {layouts} of shapes {[tuple(whole.shape) for whole in wholes]} on {mesh.shape}"
    for _ in range(2):
        tensors = [laid(whole, mesh, layout) for whole, layout in zip(wholes, layouts, strict=True)]
        results = _as_list(function(*tensors))
        assert len(results) == len(expected), note
        for result, value in zip(results, expected, strict=True):
            _check_one(result, value, note)
    if with_gradients and all(whole.is_floating_point() for whole in wholes):
        _check_gradients(function, wholes, mesh, layouts, note)
    return results


def check_parts(found: DTensor, whole: torch.Tensor) -> None:
    """Each rank has its part of `whole`, of which all are told; what is partial is added up first."""
    spec = found._spec
    assert tuple(found.shape) == tuple(whole.shape), f"{tuple(found.shape)} is not {tuple(whole.shape)}"
    assert tuple(found._local_tensor.shape) == spec.local_shape, f"the part of {found!r} has another shape"
    if any(place.is_partial() for place in found.placements):
        part, wanted = found.full_tensor(), whole
    else:
        part, wanted = (
            found._local_tensor,
            redistribute_local(whole, spec.with_layout(spec.layout.replicated()), spec.layout),
        )
    if part.dtype == wanted.dtype and torch.equal(part, wanted):
        return  # without the time that `assert_close` takes to say so
    torch.testing.assert_close(part, wanted, equal_nan=True, msg=lambda text: f"it lies as {found.placements}:\n{text}")


def _check_one(result: Any, value: torch.Tensor, note: str) -> None:
    assert isinstance(result, DTensor), note
    try:
        check_parts(result, value)
    except AssertionError as error:
        error.add_note(note)
        raise


def _check_gradients(
    function: Callable[..., Any],
    wholes: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    layouts: Sequence[Sequence[Placement]],
    note: str,
) -> None:
    plain = [whole.clone().requires_grad_() for whole in wholes]
    tensors = [
        laid(whole, mesh, layout).detach().requires_grad_() for whole, layout in zip(wholes, layouts, strict=True)
    ]
    outputs = _as_list(function(*plain))
    weights = [counted(*output.shape, start=3, dtype=output.dtype) for output in outputs]
    torch.autograd.backward(outputs, weights)
    whole_layout = [Replicate()] * mesh.ndim
    torch.autograd.backward(_as_list(function(*tensors)), [laid(weight, mesh, whole_layout) for weight in weights])
    for tensor, one in zip(tensors, plain, strict=True):
        _check_one(tensor.grad, one.grad, f"gradient, {note}")


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


class Counter:
    """An observer that remembers which collectives a rank has called."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def enqueued(self, call: Any) -> None:
        self.operations.append(call.operation)

    def completed(self, call: Any, error: Exception | None) -> None:
        pass


def collectives_of(function: Callable[[], Any]) -> list[str]:
    """The collectives that this rank calls in `function`."""
    counter, world = Counter(), disttrain.current_world()
    world.add_observer(counter)
    try:
        function()
    finally:
        world.remove_observer(counter)
    return counter.operations
