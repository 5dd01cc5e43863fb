"""torch's SyncBatchNorm on CPUs, where torch has none: what it computes, by collectives with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disttrain.errors import ShapeError
from disttrain.process_group import ProcessGroup, current_world, from_torch, functional


class SyncBatchNorm(nn.SyncBatchNorm):
    """Normalises by the statistics of all ranks' batches, which may differ in size. On GPUs it is torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = self._group() if self.training and input.device.type == "cpu" else None
        if group is None:
            output: torch.Tensor = super().forward(input)
            return output
        if input.dim() < 2:
            problem = f"the input has shape {tuple(input.shape)}."
            raise ShapeError("SyncBatchNorm", problem, "Give (batch, channels, ...).")
        dims = [0, *range(2, input.dim())]
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = values.new_tensor([values.numel() / values.shape[1]])
        # The mean first, then squares of what is left: the difference of two large sums would lose digits.
        total = functional.all_reduce(torch.cat([values.sum(dims), count]), "sum", group)
        num_values = total[-1].detach()
        mean = total[:-1] / num_values
        values = values - _spread(mean, input)
        squares = functional.all_reduce(values.square().sum(dims), "sum", group)
        values = values * _spread((squares / num_values + self.eps).rsqrt(), input)
        self._track(mean.detach(), squares.detach(), num_values)
        if self.weight is not None:
            values = values * _spread(self.weight, input) + _spread(self.bias, input)
        return values.to(input.dtype)

    def _group(self) -> ProcessGroup:
        group = self.process_group
        if isinstance(group, ProcessGroup):
            return group
        return current_world("SyncBatchNorm").default_group if group is None else from_torch(group)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, squares: torch.Tensor, num_values: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or not self.track_running_stats:
            return
        share: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if share is None else share
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = squares / (num_values - 1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def on_cpus(module: nn.Module) -> None:
    """Make torch's SyncBatchNorm, if this is one, one that computes on CPUs, too."""
    if type(module) is nn.SyncBatchNorm:
        module.__class__ = SyncBatchNorm


def _spread(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """One value per channel, to be broadcast."""
    return values.view(1, -1, *[1] * (input.dim() - 2))
