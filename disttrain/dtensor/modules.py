"""distribute_module: lay out a module's parameters, and convert what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.factories import distribute_tensor
from disttrain.errors import ArgumentError
from disttrain.mesh import DeviceMesh, checked_mesh

Partition = Callable[[str, nn.Module, DeviceMesh], None]
Convert = Callable[[nn.Module, Any, DeviceMesh], Any]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    partition_fn: Partition | None = None,
    input_fn: Convert | None = None,
    output_fn: Convert | None = None,
) -> nn.Module:
    """Make all parameters and buffers of `module` DTensors on `device_mesh`, in place.

    Args:    partition_fn  called with the name of each submodule, it and the mesh; replaces parameters by DTensors.
                           What it leaves plain is replicated.
             input_fn      called with module, forward's positional arguments and the mesh; returns those to use.
             output_fn     called with module, forward's result and the mesh; returns the one to hand on.
    Returns: `module`. Collective: every rank of the mesh; values are those of its first rank.
    """
    device_mesh = checked_mesh("distribute_module", device_mesh)
    if not isinstance(module, nn.Module):
        raise ArgumentError("distribute_module", f"module is {type(module).__name__}.", "Give an nn.Module.")
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, device_mesh)
        _replicate(submodule, device_mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda hooked, inputs: input_fn(hooked, inputs, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda hooked, _inputs, outputs: output_fn(hooked, outputs, device_mesh))
    return module


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if not isinstance(parameter, DTensor):
            whole = nn.Parameter(distribute_tensor(parameter.detach(), mesh), requires_grad=parameter.requires_grad)
            module.register_parameter(name, whole)
    for name, buffer in module.named_buffers(recurse=False):
        if not isinstance(buffer, DTensor):
            module.register_buffer(
                name, distribute_tensor(buffer, mesh), name not in module._non_persistent_buffers_set
            )
