"""Norms and dropout on activations that are cut along the sequence (Korthikanti et al., arXiv 2205.05198)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor, Shard
from disttrain.mesh import DeviceMesh
from disttrain.tp._torch import shown_as
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.layers import Parallel, as_dtensor, become, given_out
from disttrain.tp.layers.params import TERM, Cut, lay_out
from disttrain.tp.modules import FinishOutput, first_input_name, hook
from disttrain.tp.styles import ParallelStyle, check_uncut

_LOCAL = ("RMSNorm", "LayerNorm")
"""Modules whose class is called so compute along the last dim: what they do with a part, they do with the whole."""


class SequenceParallel(ParallelStyle):
    """Parameters are replicated, activations cut along the sequence.

    Norms (`nn.LayerNorm`, `nn.RMSNorm`, and what else is called so) work on the parts; other modules, such as
    `nn.Dropout`, compute with DTensors, so that the random numbers are those of a single process.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        """
        Args: sequence_dim      the dim that a plain input is cut along.
              use_local_output  give this rank's part, not a DTensor.
        """
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _cuts(self, module: nn.Module, axis: Axis) -> Mapping[str, Cut]:
        check_uncut(self, module, axis)
        return {name: TERM for name, _ in module.named_parameters(recurse=False)}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        lay_out(module, self._cuts(module, axis), axis, self.src_data_rank)
        placement = Shard(self.sequence_dim)
        if type(module).__name__.endswith(_LOCAL):
            become(
                module, SequenceNorm, SequenceState(axis, placement, self.use_local_output, first_input_name(module))
            )
        else:
            hook(module, axis, placement, placement, FinishOutput(placement, self.use_local_output))
        return module


@dataclass(frozen=True)
class SequenceState:
    """The layouts of a module's input and result on the axis."""

    axis: Axis
    placement: Shard
    use_local_output: bool
    input_name: str


class SequenceNorm(Parallel):
    """A norm that works on this rank's part of the sequence."""

    _tp: SequenceState

    def forward(self, x: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        state = self._tp
        shape = None
        if x is None:
            x = kwargs.pop(state.input_name)
        if isinstance(x, DTensor):
            laid_out = as_dtensor(x, state.placement, state.axis).redistribute(placements=[state.placement])
            shape, x = tuple(laid_out.shape), laid_out.to_local()
        used = {name: TERM.used_with_grad(parameter) for name, parameter in self.named_parameters(recurse=False)}
        with shown_as(self, used):
            part: torch.Tensor = super().forward(x, *args, **kwargs)
        if state.use_local_output and shape is None:
            return part
        whole = DTensor.from_local(part, state.axis.mesh, [state.placement], shape=shape)
        return given_out(whole, state.placement, state.use_local_output)
