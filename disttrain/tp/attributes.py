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

    def __init__(self, *names: str, num_kv_heads: int | None = None) -> None:
        """
        Args: names         of attributes that are whole numbers.
              num_kv_heads  the attributes are heads of queries for each of so many heads of keys and values. They stay
                            while each rank has such heads of its own, and are divided by the ranks that share one.
        """
        self.names = names
        self.num_kv_heads = num_kv_heads

    def _divisor(self, axis: Axis) -> int:
        return axis.size if self.num_kv_heads is None else max(1, axis.size // self.num_kv_heads)

    def _cuts(self, module: nn.Module, axis: Axis) -> None:
        divisor = self._divisor(axis)
        for name in self.names if divisor > 1 or self.num_kv_heads is None else ():
            number = getattr(module, name, None)
            if type(number) is not int or number % divisor:
                self._refuse(f"{name} of {type(module).__name__} is {number!r}, among {divisor} ranks.", axis)
            if name in module.__dict__.get(_DIVIDED, ()):
                self._refuse(f"{name} of {type(module).__name__} is a rank's share already: {number}.", axis)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        self._cuts(module, axis)
        divisor = self._divisor(axis)
        if divisor == 1 and self.num_kv_heads is not None:
            return module
        for name in self.names:
            setattr(module, name, getattr(module, name) // divisor)
        module.__dict__.setdefault(_DIVIDED, set()).update(self.names)
        return module

    def _refuse(self, problem: str, axis: Axis) -> None:
        remedy = "Name attributes that are whole numbers, multiples of the number of ranks, once each."
        raise ShardingError("DivideAttributes", problem, remedy, rank=axis.world_rank)
