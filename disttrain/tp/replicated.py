"""The style of modules that each rank computes on its part of the tokens, with parameters that all ranks have."""

from __future__ import annotations

import functools
from typing import Any, cast

from torch import nn
from torch.func import functional_call

from disttrain._python.made_classes import made_by
from disttrain.dtensor import DTensor, Partial, Replicate, distribute_tensor
from disttrain.mesh import DeviceMesh
from disttrain.tp.styles import ParallelStyle


class ReplicatedParallel(ParallelStyle):
    """All ranks have the module's parameters, and each calls it with plain tensors of its part of the tokens, as with
    sequence parallel: gradients are summed over the axis. For routers of experts, and other modules without a style of
    their own that treat tokens one by one."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in module.modules():
            for name, parameter in list(child.named_parameters(recurse=False)):
                whole = distribute_tensor(
                    parameter.detach(), device_mesh, [Replicate()], src_data_rank=self.src_data_rank
                )
                setattr(child, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        if not isinstance(module, _OnParts):
            module.__class__ = _on_parts(cast(Any, type(module)))
        return module


class _OnParts(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = {
            name: parameter.to_local(grad_placements=[Partial()])
            for name, parameter in self.named_parameters()
            if isinstance(parameter, DTensor)
        }
        if not values:
            return super().forward(*args, **kwargs)
        return functional_call(self, values, args, kwargs, tie_weights=True)


@functools.cache
def _on_parts(cls: type) -> Any:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return made_by(type(cls.__name__, (_OnParts, cls), names), _on_parts, cls)
