"""A model's state dict by canonical names, whatever is wrapped around it, and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from disttrain.checkpoint.state_dict.names import canonical_name, prefixes_of
from disttrain.checkpoint.state_dict.options import StateDictOptions
from disttrain.checkpoint.state_dict.whole import Path, broadcast_whole, gathered, laid_as, mapped, transport_device
from disttrain.dtensor import DTensor
from disttrain.errors import StateDictError

REMEDY = "Build the model as it was when it was saved, or give StateDictOptions(strict=False)."


@torch.no_grad()
def model_state_dict(
    model: nn.Module, options: StateDictOptions, submodules: Iterable[nn.Module] | None
) -> dict[str, Any]:
    """The tensors are the model's own, unless the options have others made."""
    state: dict[str, Any] = model.state_dict()
    for key in list(state):
        name = canonical_name(model, key, options.dsd_fqn_modifiers)
        if name != key:
            state[name] = state.pop(key)
    if submodules:
        state = _within(state, prefixes_of(model, submodules), options.keep_submodule_prefixes)
    if options.ignore_frozen_params:
        for key, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                state.pop(canonical_name(model, key), None)
    is_whole_on_one_rank = options.full_state_dict and options.cpu_offload
    if not (state or submodules or options.ignore_frozen_params or is_whole_on_one_rank or not options.strict):
        raise StateDictError("get_state_dict", "the model has no state.", "Give the model that is trained.")
    return gathered(state, is_full=options.full_state_dict, cpu_offload=options.cpu_offload)


def _within(state: Mapping[str, Any], prefixes: Iterable[str], keeps_prefixes: bool) -> dict[str, Any]:
    return {
        name if keeps_prefixes else name.removeprefix(prefix): value
        for name, value in state.items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


@torch.no_grad()
def load_model(model: nn.Module, state: Mapping[str, Any], options: StateDictOptions) -> Any:
    """Loads a model's state dict. Returns what torch's `load_state_dict` does: the missing and the unexpected keys.
    `state` stays as it is.

    Collective with broadcast_from_rank0: every rank.
    """
    current = model.state_dict(keep_vars=True)
    key_of: dict[Any, str] = {canonical_name(model, key, options.dsd_fqn_modifiers): key for key in current}
    values = dict(state)
    if options.full_state_dict:
        device = _device_of(current.values())

        def place(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            key = key_of.get(path[0]) if len(path) == 1 else None
            like = None if key is None else current[key]
            return laid_as(like, tensor, device)

        if options.broadcast_from_rank0:
            values = broadcast_whole(values, place, transport_device(device))
        else:
            values = mapped(values, place)
    if not values and options.strict and current:
        raise StateDictError("set_state_dict", "the model's state dict is empty.", REMEDY)
    is_on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in current.values())
    try:
        return model.load_state_dict(
            {key_of.get(name, name): value for name, value in values.items()},
            strict=options.strict,
            assign=options.full_state_dict and is_on_meta,
        )
    except RuntimeError as error:
        raise StateDictError("set_state_dict", f"{error}.", REMEDY) from error


def _device_of(values: Iterable[Any]) -> torch.device:
    """The device of a model, or the one that it will be on when it gets memory."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if tensor.ndim and not tensor.is_meta:
            return tensor.device
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    kind = meshes[0].device_type if meshes else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def by_name(model: nn.Module, state: Mapping[Any, Any]) -> dict[str, Any]:
    """The state dict as one: it may be given as one for each of several submodules, which is deprecated."""
    if not any(isinstance(key, nn.Module) for key in state):
        return dict(state)
    warnings.warn("A state dict by submodule is deprecated: give one by name.", FutureWarning, stacklevel=3)
    return {
        prefix + name: value
        for module, values in state.items()
        for prefix in prefixes_of(model, [module])
        for name, value in values.items()
    }
