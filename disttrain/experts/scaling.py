"""Loss scaling of models of which each rank has other experts as modules of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from disttrain.dtensor import DTensor
from disttrain.mesh import DeviceMesh
from disttrain.process_group import ReduceOp, all_reduce


class GradScaler(torch.amp.GradScaler):
    """torch's, where all ranks skip a step, or none, for a gradient of an expert in a ModuleList, which one rank has.

    torch's own looks at this rank's gradients, of all ranks only where they are DTensors: with it some ranks would go
    on with other scales and other weights. Here ranks that share experts agree before it looks: where a gradient of one
    is not finite, each of the others gets an inf in one of its own, of those that the step would have taken.

    Collective: `unscale_`, or `step` where that was not called before, over the ranks that share experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As torch's."""
        super().__init__(*args, **kwargs)
        self._agreed: set[int] = set()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """See torch's."""
        self._agree(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See torch's."""
        self._agree(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """See torch's."""
        self._agreed.clear()
        super().update(new_scale)

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_enabled() or id(optimizer) in self._agreed:
            return
        self._agreed.add(id(optimizer))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        axes = (getattr(each, "divided_along", None) or getattr(each, "beside_divided", None) for each in parameters)
        meshes: dict[DeviceMesh, None] = dict.fromkeys(axis for axis in axes if axis is not None)
        grads = [each.grad for each in parameters if each.grad is not None and not isinstance(each.grad, DTensor)]
        for mesh in meshes:
            _spread(grads, mesh)


@torch.no_grad()
def _spread(grads: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Put an inf into the first of `grads` where a rank of `mesh` has a value that is not finite."""
    filled = [grad for grad in grads if grad.numel()]
    largest = get_total_norm(filled, math.inf) if filled else torch.zeros(())
    is_bad = largest.isfinite().logical_not().to(mesh.device_type, torch.float32)
    all_reduce(is_bad, ReduceOp.MAX, mesh.get_group())
    if filled:
        # A view of one value, whatever the layout.
        first = filled[0][(0,) * filled[0].dim()]
        first.masked_fill_(is_bad.to(first.device) > 0, math.inf)
