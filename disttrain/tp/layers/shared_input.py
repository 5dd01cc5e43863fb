"""One input of several column-parallel layers: gathered once, multiplied by all of them at once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor, Partial, Replicate, Shard
from disttrain.tp._torch import is_compiled, own_parameters, saved_tensors_hooks
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.columns import Columns, columns
from disttrain.tp.layers.layers import (
    ColumnLayer,
    ColumnLinear,
    cutting_of,
    dim_in_graph,
    form_of,
    kept_plan,
    redistributed_part,
    spec_on,
    takes_the_long_way,
)


class Sharing:
    """Gathers a module's input for the layers in it that take it as it is. It belongs to one module.

    What the layers have made of the input waits here until each is called with it, or the module has returned.
    """

    def __init__(self, axis: Axis, layout: Shard, names: Sequence[str] | None) -> None:
        """`layout`: how a plain input lies; `names` of the layers, default all linear ones among the children."""
        self.axis, self.layout, self.names = axis, layout, names
        self._plans: dict[Any, Columns | None] = {}
        self._layers: list[ColumnLinear] | None = None
        self._whole: torch.Tensor | None = None
        self._results: dict[int, torch.Tensor] = {}
        self._saved_under: object = None
        self._has_warned = False

    def gathered(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """All of `x` as a DTensor, of which the layers' results are known then; None where this is not to be had.

        Collective.
        """
        if is_compiled(module):
            # What a hook of the outermost compiled module makes is an output of a graph, whose gradient torch 2.13
            # takes for a plain tensor where nobody uses it; or it is made outside, and not for the graph to see.
            return None
        if self._layers is None:
            self.find_layers(module)
        if self._layers and self.names is None:
            self._keep([layer for layer in self._layers if _takes(layer, x)])
        layers = self._layers
        if not layers:
            return None
        parameters = _parameters_of(layers)
        if parameters is None:
            return None
        if takes_the_long_way(x):
            made = self._in_graph(x, [layer._tp for layer in layers], parameters)
        else:
            made = self._at_once(x, [layer._tp for layer in layers], parameters)
        if made is None:
            return None
        self._whole, self._saved_under = made[0], _saved_under()
        self._results = dict(enumerate(made[1:]))
        return made[0]

    def result_for(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The result of the layer of this number for `x`, handed out once; None for another input.

        Nor within activation checkpointing that began since: it would multiply when it computes again.
        """
        if x is not self._whole:
            return None
        result = self._results.pop(index, None)
        return result if self._saved_under == _saved_under() else None

    def release(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        """A forward hook, called in any case: the module has returned, or was left by an exception.

        A layer that was multiplied by an input that it was never given takes another one: from now on it is left alone,
        with a warning where it has been named. What activation checkpointing computes again, it may leave early; there
        is no output then.
        """
        indices, unasked = set(self._results), len(self._results)
        self._whole, self._results = None, {}
        if unasked and output is not None and self.names is None and not torch.compiler.is_compiling():
            self._keep([layer for index, layer in enumerate(self._layers or ()) if index not in indices])
        elif unasked and output is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(module).__name__}: {unasked} of the ColwiseParallel layers in it were multiplied by its "
                "gathered input and are not called with it. Name those that are: PrepareModuleInput(shared_by=[...]).",
                stacklevel=2,
            )

    def _at_once(
        self, x: torch.Tensor, states: Sequence[ColumnLayer], parameters: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor] | None:
        plan = kept_plan(self._plans, form_of(x), lambda: self._plan(x, states, parameters))
        return None if plan is None else columns(x, plan, parameters)

    def _in_graph(
        self, x: torch.Tensor, states: Sequence[ColumnLayer], parameters: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor] | None:
        dim = dim_in_graph(x, self.layout, self.axis)
        if dim is None:
            return None
        part = redistributed_part(x, self.layout, self.axis)
        whole, *parts = ColumnLayer.in_graph(part, dim, states, parameters[::2], parameters[1::2])
        results = [
            state.given_from_part(made, state.num_outputs(weight)) if weight is not None else made
            for state, made, weight in zip(states, parts, parameters[::2], strict=True)
        ]
        return [DTensor.from_local(whole, self.axis.mesh, [Replicate()], grad_placements=[Partial()]), *results]

    def find_layers(self, module: nn.Module) -> None:
        """Those that take the input, if they are cut already."""
        named = module.children() if self.names is None else map(module.get_submodule, dict.fromkeys(self.names))
        layers = [
            layer
            for layer in named
            if isinstance(layer, ColumnLinear)
            and layer._tp.axis == self.axis
            and layer._tp.input.is_replicate()
            and not layer._tp.matrix.has_own_backward
            # One input: of several that are gathered, the first.
            and layer._tp_shared is None
        ]
        for index, layer in enumerate(layers):
            layer._tp_shared = (self, index)
        self._layers = layers or None

    def _keep(self, layers: list[ColumnLinear]) -> None:
        """Leave all others alone: they take other inputs than the module's."""
        if len(layers) == len(self._layers or ()):
            return
        for layer in self._layers or ():
            layer._tp_shared = None
        for index, layer in enumerate(layers):
            layer._tp_shared = (self, index)
        self._layers = layers
        self._plans.clear()

    def _plan(
        self, x: torch.Tensor, states: Sequence[ColumnLayer], parameters: Sequence[torch.Tensor | None]
    ) -> Columns | None:
        spec = spec_on(self.axis, x)
        overlap = next((state.overlap for state in states if state.overlap is not None), None)
        cutting = cutting_of(x, self.layout if spec is None else spec.placements[0], self.axis, overlap)
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


def _saved_under() -> object:
    return None if torch.compiler.is_compiling() else saved_tensors_hooks()


def _takes(layer: ColumnLinear, x: torch.Tensor) -> bool:
    """True where `x` has as many features as the layer multiplies."""
    in_features: int = layer.weight.shape[layer._tp.matrix.in_dim]
    return in_features == x.shape[-1]


def _parameters_of(layers: Sequence[ColumnLinear]) -> list[torch.Tensor | None] | None:
    """Weights and biases, in turn; None where, for now, something else has cut them as well."""
    parameters: list[torch.Tensor | None] = []
    for layer in layers:
        weight, bias = own_parameters(layer, "weight", "bias")
        if weight is None or not (torch.compiler.is_compiling() or layer._tp.is_laid_out(weight, bias)):
            return None
        parameters += (weight, bias)
    return parameters
