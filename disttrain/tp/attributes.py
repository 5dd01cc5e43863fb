"""Numbers that a module counts its own outputs by: each rank has its share of them."""

from __future__ import annotations

from torch import nn

from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.tp.layers.axis import Axis
from disttrain.tp.styles import ParallelStyle

_DIVIDED = "_disttrain_divided"
"""Attributes of a module that are shares already."""


class DivideAttributes(ParallelStyle):
    """Divide attributes of a module by the number of ranks.

    For code that is told how many features or heads there are, such as GPT-2's attention, which splits its layer's
    output by `split_size`: `DivideAttributes("split_size")`.
    """

    def __init__(self, *names: str) -> None:
        """`names` of attributes that are whole numbers."""
        self.names = names

    def _cuts(self, module: nn.Module, axis: Axis) -> None:
        for name in self.names:
            number = getattr(module, name, None)
            if type(number) is not int or number % axis.size:
                self._refuse(f"{name} of {type(module).__name__} is {number!r}, among {axis.size} ranks.", axis)
            if name in module.__dict__.get(_DIVIDED, ()):
                self._refuse(f"{name} of {type(module).__name__} is a rank's share already: {number}.", axis)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        self._cuts(module, axis)
        for name in self.names:
            setattr(module, name, getattr(module, name) // axis.size)
        module.__dict__.setdefault(_DIVIDED, set()).update(self.names)
        return module

    def _refuse(self, problem: str, axis: Axis) -> None:
        remedy = "Name attributes that are whole numbers, multiples of the number of ranks, once each."
        raise ShardingError("DivideAttributes", problem, remedy, rank=axis.world_rank)
