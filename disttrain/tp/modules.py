"""Modules that compute with DTensors: how they are told, and how their inputs and outputs are prepared."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor, Placement
from disttrain.errors import ShardingError
from disttrain.tp._torch import hook_after, hook_before
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.layers import as_dtensor, given_out


@dataclass(frozen=True)
class PrepareFirst:
    """A hook that gives a module its first input as a DTensor that lies as it computes best."""

    axis: Axis
    layout: Placement
    wanted: Placement
    name: str
    """By which the input may come."""

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        if inputs:
            return (self._placed(inputs[0]), *inputs[1:]), by_name
        if self.name in by_name:
            by_name = {**by_name, self.name: self._placed(by_name[self.name])}
        return inputs, by_name

    def _placed(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        placed = as_dtensor(x, self.layout, self.axis)
        return placed if placed.placements == (self.wanted,) else placed.redistribute(placements=[self.wanted])


@dataclass(frozen=True)
class FinishOutput:
    """A hook that gives out what a module has computed, a DTensor, as it is asked for."""

    placement: Placement
    use_local_output: bool

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, DTensor):
            return given_out(output, self.placement, self.use_local_output)
        return output


def hook(module: nn.Module, axis: Axis, layout: Placement, wanted: Placement, finish: FinishOutput) -> None:
    """Let a module compute with its first input laid out as `wanted`; plain ones lie as `layout`."""
    hook_before(module, PrepareFirst(axis, layout, wanted, first_input_name(module)))
    hook_after(module, finish)


def first_input_name(module: nn.Module) -> str:
    """The name of the first argument of the module's forward; "" where it has none."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One placement, or one per tensor."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def check_module(operation: str, module: Any) -> None:
    """Raise ShardingError for what is no module."""
    if not isinstance(module, nn.Module):
        raise ShardingError(operation, f"a {type(module).__name__} is given, and no module.", "Give an nn.Module.")
