"""The steps of torch's styles, for classes that derive from one and put their own in place of some.

Such a class gives them to `distribute_module` in an `_apply` of its own; the layers then compute with DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor, Placement, Shard
from disttrain.mesh import DeviceMesh
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.params import lay_out


class StyleHooks:
    """Layouts are single placements, which all that takes placements takes for those of a mesh of one axis."""

    src_data_rank: int | None

    def _partition_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Lay out `module`'s own parameters as the style says. Collective, as parallelize_module."""
        axis = Axis.of("parallelize_module", device_mesh)
        cuts = self._cuts(module, axis)  # type: ignore[attr-defined]  # every style has it
        lay_out(module, cuts, axis, self.src_data_rank)

    _partition_linear_fn = _partition_embedding_fn = _partition_fn

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placement, desired_input_layouts: Placement, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> DTensor:
        """The first input, laid out as the layer wants it."""
        first = inputs[0]
        tensor = first if isinstance(first, DTensor) else DTensor.from_local(first, device_mesh, (input_layouts,))
        return tensor.redistribute(placements=(desired_input_layouts,))

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placement | None,
        use_local_output: bool,
        mod: nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor:
        """The output laid out as the style says, and this rank's part of it where that is wanted."""
        laid_out = outputs.redistribute(placements=(output_layouts or Shard(-1),))
        return laid_out.to_local() if use_local_output else laid_out
