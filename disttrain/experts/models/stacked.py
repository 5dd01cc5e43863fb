"""Modules that hold all experts' weights in tensors of three dims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from disttrain.experts.expert_layer import crossing_part, local_part, local_share
from disttrain.experts.models.computation import Stacks, named

_NAMES: Final = (
    # Transformers; Megatron and vLLM; torchtitan; transformers' own names apart; DBRX; without a gate.
    (("gate_up_proj",), "down_proj"),
    (("w13_weight",), "w2_weight"),
    (("w13",), "w2"),
    (("w1", "w3"), "w2"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("mlp.w1", "mlp.v1"), "mlp.w2"),
    (("up_proj",), "down_proj"),
    (("w1",), "w2"),
)


@dataclass(frozen=True)
class StackedWeights:
    """The names of a module's stacked weights.

    Args: into   one name, or gate's and up's;  down  the projection back.
          into_bias, down_bias  their biases' names, where they have such.
          num_experts  how many there are.
          width, hidden  what goes into an expert, and what lies between its two products.
          is_transposed  weights are (experts, in, out).
          is_flat  each weight is (experts * hidden, width), down's too.
    """

    into: tuple[str, ...]
    down: str
    num_experts: int
    width: int
    hidden: int
    into_bias: tuple[str, ...] = ()
    down_bias: str = ""
    is_transposed: bool = False
    is_flat: bool = False
    has_gate: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, with dots."""
        return (*self.into, self.down, *self.into_bias, *([self.down_bias] if self.down_bias else []))

    def stacks(self, module: nn.Module, num_experts: int, *, crosses: bool = False) -> Stacks:
        """The tensors that `module` has on this rank, of `num_experts` experts; `crosses`: for a crossing."""
        # Those that are joined or viewed below have to be plain.
        is_as_given = crosses and not self.is_flat and (len(self.into) == 1 or not self.into_bias)
        part = crossing_part if is_as_given else local_part
        into = tuple(part(named(module, name)) for name in self.into)
        down = part(named(module, self.down))
        if self.is_flat:
            into = tuple(weight.view(num_experts, -1, weight.shape[1]) for weight in into)
            down = down.view(num_experts, -1, down.shape[1]).transpose(1, 2)
        biases = tuple(part(named(module, name)) for name in self.into_bias)
        down_bias = local_share(named(module, self.down_bias), module) if self.down_bias else None
        return Stacks(into, down, biases, down_bias)

    def width_of(self, module: nn.Module) -> int:
        """The columns of the rows that the experts of `module` take."""
        shape: torch.Size = named(module, self.down).shape
        return shape[1 if self.is_flat else 2 if self.is_transposed else 1]


def stacked_weights(module: nn.Module) -> list[StackedWeights]:
    """Reads the module's experts by names and shapes: all ways that fit, of the names that fit first."""
    for into, down in _NAMES:
        tensors = [_parameter(module, name) for name in (*into, down)]
        shapes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
        if len(shapes) == len(tensors):
            ways = list(_of_shapes(module, into, down, shapes))
            if ways:
                return ways
    return []


def named_weights(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The module's parameters that are called as stacked weights are, whatever their shapes."""
    for into, down in _NAMES:
        tensors = {name: _parameter(module, name) for name in (*into, down)}
        found = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
        if len(found) == len(tensors):
            return found
    return []


def _of_shapes(
    module: nn.Module, into: tuple[str, ...], down: str, shapes: list[tuple[int, ...]]
) -> Iterator[StackedWeights]:
    first, last = shapes[0], shapes[-1]
    if len(set(shapes[:-1])) != 1:
        return
    if "." in down:
        experts = _number(named(module, down.rpartition(".")[0]))
        if len(last) == 2 and len(set(shapes)) == 1 and experts and last[0] % experts == 0:
            yield StackedWeights(into, down, experts, last[1], last[0] // experts, is_flat=True)
        return
    if len(first) != 3 or len(last) != 3 or first[0] != last[0]:
        return
    has_gate = len(into) == 2 or (first[2], first[1]) != (last[1], last[2])
    factor = 2 if has_gate and len(into) == 1 else 1
    for is_transposed in (False, True):
        (rows, width), (back, hidden) = (first[1:], last[1:]) if not is_transposed else (first[:0:-1], last[:0:-1])
        if rows == factor * hidden and back == width:
            biases = [_bias(module, name) for name in (*into, down)]
            yield StackedWeights(
                into,
                down,
                first[0],
                width,
                hidden,
                tuple(name for name in biases[:-1] if name),
                biases[-1],
                is_transposed,
                has_gate=has_gate,
            )


def _bias(module: nn.Module, name: str) -> str:
    for bias in (f"{name}_bias", f"{name.removesuffix('_weight')}_bias", f"b{name[1:]}"):
        if _parameter(module, bias) is not None:
            return bias
    return ""


def _number(module: nn.Module) -> int:
    """The number of experts that a module says it has."""
    values = [value for name, value in vars(module).items() if name.endswith("num_experts") and type(value) is int]
    return values[0] if len(values) == 1 else 0


def _parameter(module: nn.Module, path: str) -> torch.Tensor | None:
    owner, _, name = path.rpartition(".")
    try:
        holder: Any = named(module, owner) if owner else module
    except AttributeError:
        return None
    value = getattr(holder, name, None) if isinstance(holder, nn.Module) else None
    return value if isinstance(value, torch.Tensor) else None


def others(module: nn.Module, weights: StackedWeights) -> Iterator[str]:
    """The parameters and buffers that are no part of the experts, but for the norm's."""
    names = {*weights.names}
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        if name not in names and not name.startswith("post_expert_norm."):
            yield name
