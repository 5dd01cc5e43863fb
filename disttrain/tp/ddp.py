"""Cut modules under torch's DistributedDataParallel, which takes plain parameters: it is given the local parts.

Source of the name: torch/distributed/tensor/parallel/ddp.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor
from disttrain.tp._torch import hook_after, hook_before, put_parameters


@dataclass
class _Parts:
    """Of one module: its DTensors' local parts as parameters, and how each lies, by name."""

    module: nn.Module
    local: dict[str, nn.Parameter] = field(default_factory=dict)
    cut: dict[str, DTensor] = field(default_factory=dict)

    def show_whole(self) -> None:
        put_parameters(self.module, {name: self._whole(name) for name in self.local})

    def show_local(self) -> None:
        put_parameters(self.module, dict(self.local))

    def _whole(self, name: str) -> torch.Tensor:
        lies = self.cut[name]
        return DTensor.from_local(
            self.local[name],
            lies.device_mesh,
            lies.placements,
            run_check=False,
            shape=lies.shape,
            stride=lies.stride(),
        )


def _pre_dp_module_transform(module: nn.Module) -> None:
    """Shows the local parts of a cut module's parameters in place of DTensors, but while `module` runs its forward.

    Then `DistributedDataParallel(module, process_group=...)`, over the ranks that have the same parts, averages their
    gradients; an optimizer is made of the local parts, and a state dict has these.
    """
    parts: list[_Parts] = []
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        part = _Parts(each)
        for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                local = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
                part.local[name] = made.setdefault(id(parameter), local)
                part.cut[name] = parameter
        if part.local:
            part.show_local()
            parts.append(part)

    def before(*_: Any) -> None:
        for part in parts:
            part.show_whole()

    def after(*_: Any) -> None:
        for part in parts:
            part.show_local()

    hook_before(module, lambda module, args, kwargs: before())
    hook_after(module, after, always=True)
