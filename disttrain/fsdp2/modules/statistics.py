"""Running statistics of norms that see each rank's batch alone: rank 0's on all ranks, as under DDP.

A BatchNorm learns its running mean and variance from what its rank sees. Left alone, ranks would evaluate with
different ones, and a checkpoint would have one rank's. So after each forward in training the ranks take those of the
mesh's first rank. DDP sends them before the next one; values are the same, but here they are alike in between, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import nn

from disttrain.dtensor import DTensor
from disttrain.mesh import DeviceMesh
from disttrain.process_group import broadcast

_NAMES = {"running_mean", "running_var", "num_batches_tracked"}


class RunningStatistics:
    """Those of the modules below `roots`, on the ranks of `mesh`."""

    def __init__(self, roots: Iterable[nn.Module], mesh: DeviceMesh | None) -> None:
        modules = dict.fromkeys(chain.from_iterable(root.modules() for root in roots))
        self._norms = [module for module in modules if _is_norm_of_a_rank(module)]
        self._mesh = mesh

    @torch.no_grad()
    def share(self) -> None:
        """Take rank 0's, of modules that are in training. Collective where there are some."""
        if not self._norms or self._mesh is None or self._mesh.size() == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in self._tensors():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            self._take_first(tensors, self._mesh)

    def _take_first(self, tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
        packed = torch.cat([tensor.flatten() for tensor in tensors])
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                broadcast(packed, group=mesh.get_group(axis), group_src=0)
        if any(mesh.get_coordinate() or ()):
            parts = packed.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                # Through `data`, which autograd does not see: it keeps the statistics for backward, though in training
                # nothing is computed with them, and takes a write for one to what it needs.
                tensor.data.copy_(part.view_as(tensor))

    def _tensors(self) -> Iterator[torch.Tensor]:
        for norm in self._norms:
            if norm.training:
                for value in (norm.running_mean, norm.running_var):
                    # A DTensor is alike already.
                    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_meta:
                        yield value


def _is_norm_of_a_rank(module: nn.Module) -> bool:
    """True for BatchNorm and its like, also of other libraries; False where all ranks' batches count."""
    names = {name for name, _ in module.named_buffers(recurse=False)}
    return names >= _NAMES and not isinstance(module, nn.SyncBatchNorm)
