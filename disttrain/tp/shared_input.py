"""One input of several column-parallel layers: gathered once, multiplied by all of them at once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import Shard
from disttrain.tp._torch import has_pre_hooks
from disttrain.tp.axis import Axis
from disttrain.tp.columns import ColumnInput, columns
from disttrain.tp.layers import ColumnLinear, spec_on, takes_the_long_way


class SharedInput:
    """What the layers have made of one input, until each is asked for its own result."""

    def __init__(self, results: dict[int, torch.Tensor]) -> None:
        self._results = results
        self._asked: set[int] = set()

    def result_for(self, layer: nn.Module) -> torch.Tensor | None:
        """None for a layer that was not known to take this input."""
        self._asked.add(id(layer))
        return self._results.get(id(layer))

    @property
    def num_unasked(self) -> int:
        return len(self._results.keys() - self._asked)


def sharing_layers(module: nn.Module, names: Sequence[str] | None, axis: Axis) -> list[ColumnLinear]:
    """The layers of `module` that take its gathered input as it is: of these names, or its own children."""
    layers = module.children() if names is None else [module.get_submodule(name) for name in names]
    return [
        layer
        for layer in layers
        if isinstance(layer, ColumnLinear)
        and layer._tp.axis == axis
        and layer._tp.input.is_replicate()
        and layer._tp.is_laid_out(layer.weight, layer.bias)
        and not has_pre_hooks(layer)
    ]


def gathered(
    layers: Sequence[ColumnLinear], x: torch.Tensor, given: Shard, axis: Axis
) -> tuple[torch.Tensor, SharedInput] | None:
    """All of `x`, which lies as `given` if it is plain, as a DTensor that knows what the layers have made of it.

    None where `x` comes in a way that takes DTensor's help. Collective.
    """
    spec = spec_on(axis, x)
    placement = given if spec is None else spec.placements[0]
    if takes_the_long_way(x) or not isinstance(placement, Shard):
        return None
    dim = placement.dim % x.ndim
    if dim == x.ndim - 1 or (spec is not None and spec.shape[dim] % axis.size):
        return None
    overlap = next((layer._tp.overlap for layer in layers if layer._tp.overlap is not None), None)
    come = ColumnInput(axis, dim, spec, overlap)
    asked = [layer._tp.column(x, come, layer.weight) for layer in layers]
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    whole, *results = columns(x, come, asked, parameters, keeps_whole=True)
    shared = SharedInput({id(layer): result for layer, result in zip(layers, results, strict=True)})
    whole._shared_input = shared  # type: ignore[attr-defined]
    return whole, shared


class CheckAsked:
    """A forward hook: warns once where a layer was multiplied by an input that it is never given."""

    def __init__(self) -> None:
        self.shared: SharedInput | None = None
        self.has_warned = False

    def __call__(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        shared, self.shared = self.shared, None
        if shared is None or not shared.num_unasked or self.has_warned:
            return
        self.has_warned = True
        warnings.warn(
            f"{type(module).__name__}: {shared.num_unasked} of the ColwiseParallel layers in it were multiplied by its "
            "gathered input and are not called with it. Name those that are: PrepareModuleInput(shared_by=[...]).",
            stacklevel=2,
        )
