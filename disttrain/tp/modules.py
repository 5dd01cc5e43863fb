"""Modules that compute with DTensors: how they are told, and how their inputs and outputs are prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor, Placement
from disttrain.tp.axis import Axis
from disttrain.tp.layers import as_dtensor, given_out


@dataclass(frozen=True)
class PrepareFirst:
    """A hook that gives a module its first input as a DTensor that lies as it computes best."""

    axis: Axis
    given: Placement
    wanted: Placement

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        if not isinstance(x, torch.Tensor):
            return inputs
        placed = as_dtensor(x, self.given, self.axis)
        if placed.placements != (self.wanted,):
            placed = placed.redistribute(placements=[self.wanted])
        return (placed, *rest)


@dataclass(frozen=True)
class FinishOutput:
    """A hook that gives out what a module has computed, a DTensor, as it is asked for."""

    placement: Placement
    use_local_output: bool

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, DTensor):
            return given_out(output, self.placement, self.use_local_output)
        return output


def hook(module: nn.Module, prepare: PrepareFirst, finish: FinishOutput) -> None:
    """Let both stand before and after the module's own forward."""
    module.register_forward_pre_hook(prepare)
    module.register_forward_hook(finish)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One placement, or one per tensor."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)
