"""Runs the steps of a program, on plain tensors or on DTensors: what differs is who makes the leaves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from disttrain.dtensor import Placement
from disttrain.errors import LayoutError, ShapeError
from disttrain.mesh import DeviceMesh
from tests.cases.dtensors import laid
from tests.dtensor_programs.program import Leaf, Ref, Step, leaves_of, mapped

MakeLeaf = Callable[[Leaf, Sequence[Placement]], torch.Tensor]
Redistribute = Callable[[torch.Tensor, Sequence[Placement]], torch.Tensor]

REFUSALS = (LayoutError, ShapeError)
"""Errors that are an answer, where all ranks get them alike."""


def leaf_maker(mesh: DeviceMesh) -> MakeLeaf:
    """Makes leaves as DTensors on `mesh`."""

    def make(leaf: Leaf, placements: Sequence[Placement]) -> torch.Tensor:
        return laid(leaf.value(), mesh, placements).detach().requires_grad_(leaf.requires_grad)

    return make


def plain_leaf(leaf: Leaf, placements: Sequence[Placement]) -> torch.Tensor:
    return leaf.value().requires_grad_(leaf.requires_grad)


def redistribute(tensor: Any, placements: Sequence[Placement]) -> torch.Tensor:
    # A copy, so that it does not depend on the layouts whether memory is shared.
    return tensor.redistribute(placements=placements).clone()


def plain_redistribute(tensor: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
    return tensor.clone()


def gradient(output: torch.Tensor, inputs: list[torch.Tensor], again: bool) -> list[torch.Tensor | None]:
    """Of the output's sum; `again` for one that can be differentiated itself."""
    return list(torch.autograd.grad(output.sum(), inputs, create_graph=again, retain_graph=True, allow_unused=True))


def backward(output: torch.Tensor) -> None:
    output.sum().backward(retain_graph=True)


def function_named(name: str) -> Callable[..., Any]:
    if name.startswith("."):
        return lambda first, *args, **kwargs: getattr(first, name[1:])(*args, **kwargs)
    if name in _OWN:
        return _OWN[name]
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


_OWN: dict[str, Callable[..., Any]] = {
    "gradient": gradient,
    "backward": backward,
    "operator.getitem": operator.getitem,
    "operator.setitem": operator.setitem,
}


class Run:
    """The results of steps so far, and which steps were refused.

    Args: noise  relative, put on all results that may round, and zeros lose their signs; what differs much for that
    says nothing.
    """

    def __init__(self, make_leaf: MakeLeaf, move: Redistribute, noise: float = 0.0, seed: int = 0) -> None:
        self.values: dict[int, Any] = {}
        self.refused: dict[int, Exception] = {}
        self._leaves: set[int] = set()
        self._make_leaf, self._move = make_leaf, move
        self._noise, self._generator = noise, torch.Generator().manual_seed(seed)

    def do(self, step: Step) -> None:
        """Run one step. Errors go to the caller, but for refusals, after which what needs its result is left out."""
        if step.needs & self.refused.keys():
            self.refused[step.number] = LayoutError(step.function, "its operand was refused")
            return
        try:
            with torch.set_grad_enabled(not step.without_grad):
                self.values[step.number] = self.result_of(step)
        except REFUSALS as error:
            self.refused[step.number] = error

    def is_leaf(self, number: int) -> bool:
        """Whether that step has made a tensor of its own."""
        return number in self._leaves

    def result_of(self, step: Step) -> Any:
        args = mapped(self._value, step.args)
        kwargs = {name: mapped(self._value, value) for name, value in step.kwargs}
        if step.function == "leaf":
            self._leaves.add(step.number)
            return self._make_leaf(*args)
        if step.function == "redistribute":
            return self._move(*args)
        function = function_named(step.function)
        result = mapped(lambda leaf: leaf, function(*args, **kwargs))
        if self._noise and _is_pure(step) and not _memory_of(result) & _memory_of(args):
            nudged = mapped(partial(self._nudged, rounds=step.rounds), args)
            result = mapped(lambda leaf: leaf, function(*nudged, **kwargs))
        if self._noise:
            self._disturb(args[0] if result is None else result, rounds=step.rounds)
        return result

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        value = self.values[leaf.step]
        return value if leaf.item is None else value[leaf.item]

    def _disturb(self, result: Any, *, rounds: bool) -> None:
        """Round otherwise, and give zeros the sign that they have as sums of parts."""
        for tensor in leaves_of(result):
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                # Zeros of autograd, and what is expanded, have no memory of their own.
                with suppress(RuntimeError):
                    # `.data`, so that autograd does not see the write.
                    tensor.data.add_(self._noise_for(tensor.data) if rounds else 0.0)

    def _nudged(self, operand: Any, *, rounds: bool) -> Any:
        """An operand with noise of its own at each place: what cancels out in a gradient then leaves some."""
        if not isinstance(operand, torch.Tensor) or not operand.is_floating_point():
            return operand
        if not (rounds or operand.dtype == torch.bfloat16):
            return operand
        noise = torch.randn(operand.shape, dtype=operand.dtype, generator=self._generator)
        return operand * (1 + noise * self._noise * torch.finfo(operand.dtype).eps)

    def _noise_for(self, values: torch.Tensor) -> torch.Tensor:
        """In proportion to each value; where little is left, as of large ones that cancel out, to the largest."""
        noise = torch.randn(values.shape, dtype=values.dtype, generator=self._generator)
        size, eps = values.abs().nan_to_num(0.0, 0.0, 0.0), torch.finfo(values.dtype).eps
        largest = size.max() if size.numel() else size.sum()
        return noise * self._noise * eps * torch.where(size < self._noise * eps * largest, largest, size)


def _is_pure(step: Step) -> bool:
    """False for what writes to operands, or takes gradients by them."""
    is_inplace = step.function.endswith("_") or any(name == "out" for name, _ in step.kwargs)
    return step.function not in _OWN and not is_inplace


def _memory_of(values: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(values)}


def tensors_in(values: Any) -> list[Any]:
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]
