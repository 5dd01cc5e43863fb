"""Numbers that a module counts its own outputs by: each rank has its share of them."""

from __future__ import annotations

from torch import nn

from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.tp.axis import Axis
from disttrain.tp.styles import ParallelStyle


class DivideAttributes(ParallelStyle):
    """Divide attributes of a module by the number of ranks.

    For code that is told how many features or heads there are, such as GPT-2's attention, which splits its layer's
    output by `split_size`: `DivideAttributes("split_size")`.
    """

    def __init__(self, *names: str) -> None:
        """`names` of attributes that are whole numbers."""
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of("parallelize_module", device_mesh)
        for name in self.names:
            number = getattr(module, name, None)
            if not isinstance(number, int) or number % axis.size:
                raise ShardingError(
                    "DivideAttributes",
                    f"{name} of {type(module).__name__} is {number!r}, among {axis.size} ranks.",
                    "Name attributes that are whole numbers, multiples of the number of ranks.",
                    rank=axis.world_rank,
                )
        for name in self.names:
            setattr(module, name, getattr(module, name) // axis.size)
        return module
