"""One input of several column-parallel layers: gathered once, multiplied by all of them at once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import Replicate, Shard
from disttrain.tp._torch import backward_is_running, own_parameters
from disttrain.tp.axis import Axis
from disttrain.tp.columns import Columns, columns
from disttrain.tp.layers import ColumnLayer, ColumnLinear, cutting_of, form_of, spec_on, takes_the_long_way


class SharedInput:
    """What the layers have made of one input, until each is asked for its own result."""

    def __init__(self, results: dict[int, torch.Tensor]) -> None:
        self._results = results
        self.unasked = set(results)
        """Layers that have not been called with the input."""

    def result_for(self, layer: nn.Module) -> torch.Tensor | None:
        """Handed out once; None for a layer that was not known to take this input."""
        self.unasked.discard(id(layer))
        return self._results.pop(id(layer), None)


class Sharing:
    """Gathers a module's input for the layers in it that take it as it is. It belongs to one module."""

    def __init__(self, axis: Axis, given: Shard, names: Sequence[str] | None) -> None:
        """`given`: how a plain input lies; `names` of the layers, default all linear ones among the children."""
        self.axis, self.given, self.names = axis, given, names
        self._plans: dict[Any, Columns | None] = {}
        self._layers: list[ColumnLinear] | None = None
        self._last: set[int] | None = None
        self._has_warned = False

    def gathered(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """All of `x` as a DTensor that knows what the layers have made of it; None where this is not to be had.

        Collective.
        """
        if self._layers is None:
            self._layers = self._find(module)
        layers = self._layers
        if not layers or takes_the_long_way(x):
            return None
        states = [layer._tp for layer in layers]
        parameters: list[torch.Tensor | None] = []
        for layer, state in zip(layers, states, strict=True):
            weight, bias = own_parameters(layer, "weight", "bias")
            if weight is None or not state.is_laid_out(weight, bias):
                return None
            parameters += (weight, bias)
        key = form_of(x)
        plan = self._plans.get(key) or self._plans.setdefault(key, self._plan(x, states, parameters))
        if plan is None:
            return None
        whole, *results = columns(x, plan, parameters)
        shared = SharedInput(dict(zip(map(id, layers), results, strict=True)))
        whole._shared_input = shared  # type: ignore[attr-defined]
        self._check_last(module, shared)
        return whole

    def _find(self, module: nn.Module) -> list[ColumnLinear]:
        layers = module.children() if self.names is None else [module.get_submodule(name) for name in self.names]
        return [
            layer
            for layer in layers
            if isinstance(layer, ColumnLinear) and layer._tp.axis == self.axis and layer._tp.input.is_replicate()
        ]

    def _plan(
        self, x: torch.Tensor, states: Sequence[ColumnLayer], parameters: Sequence[torch.Tensor | None]
    ) -> Columns | None:
        spec = spec_on(self.axis, x)
        overlap = next((state.overlap for state in states if state.overlap is not None), None)
        cutting = cutting_of(x, self.given if spec is None else spec.placements[0], self.axis, overlap)
        if cutting is None:
            return None
        shape = list(x.shape)
        if spec is None:
            shape[cutting.dim] *= self.axis.size
        layers = tuple(
            state.column(x, cutting, weight)
            for state, weight in zip(states, parameters[::2], strict=True)
            if weight is not None
        )
        return Columns(self.axis, cutting, spec, layers, self.axis.spec(Replicate(), shape, x.dtype))

    def _check_last(self, module: nn.Module, shared: SharedInput) -> None:
        """Warn once where, the time before, a layer was multiplied by an input that it was never given.

        What activation checkpointing computes again, it may leave early; that is not looked at.
        """
        last, self._last = self._last, None if backward_is_running() else shared.unasked
        if not last or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{type(module).__name__}: {len(last)} of the ColwiseParallel layers in it were multiplied by its "
            "gathered input and are not called with it. Name those that are: PrepareModuleInput(shared_by=[...]).",
            stacklevel=2,
        )
