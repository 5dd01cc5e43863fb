"""The state of models and optimizers, by parameter name: a save fits any later order, grouping or sharding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from disttrain.arguments import arguments_of
from disttrain.checkpoint.kinds import check_model, listed
from disttrain.checkpoint.stateful import Unfilled, Value, make_plain
from disttrain.dtensor import DTensor
from disttrain.errors import CheckpointError
from disttrain.process_group.calls.packing import pack

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts that torch.compile and activation checkpointing put into names."""

_OWN_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options of a group that do not change results: each optimizer keeps its own."""


def training_state(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = ()) -> dict[str, Any]:
    """The state of a model and its optimizers, to be saved, or to be loaded into.

    Returns: {"model": {name: tensor}, "optimizer": {parameter name: {"options": Value, "state": {...}}}}. Tensors are
    the model's and the optimizers' own, not copies. Where an optimizer has no state yet, an Unfilled stands for it: a
    save skips it, a load fills it as the parameter lies. Raises CheckpointError for a parameter that is not the
    model's, or that two optimizers have.
    """
    names = _parameter_names(model)
    entries: dict[str, Any] = {}
    for optimizer, group, parameter in _members(optimizers):
        name = _name(names, parameter)
        if name in entries:
            raise CheckpointError(
                "training_state", f"parameter {name!r} is in two optimizers.", "Let one of them have it."
            )
        state = optimizer.state.get(parameter)
        entries[name] = {
            "options": Value({key: value for key, value in group.items() if key not in _OWN_OPTIONS}),
            "state": dict(state) if state else Unfilled(_Maker(parameter)),
        }
    return {"model": model_state(model), "optimizer": entries}


def set_training_state(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], state: dict[str, Any]) -> None:
    """Give a model and its optimizers the state that `training_state` returned and a load filled.

    No step need have been taken before. Raises CheckpointError when names don't fit, or when parameters that are in one
    group had different options.
    """
    check_model("set_training_state", model)
    with arguments_of("set_training_state", remedy="Give what training_state has returned."):
        parts = state["model"], state["optimizer"]
    load_model_state(model, parts[0])
    names, entries = _parameter_names(model), parts[1]
    wanted = {_name(names, parameter) for _, _, parameter in _members(optimizers)}
    if wanted != set(entries):
        raise CheckpointError(
            "set_training_state",
            f"the optimizers have {sorted(wanted - set(entries))} that the state has not, the state "
            f"{sorted(set(entries) - wanted)} that they have not.",
            "Give the same parameters to the optimizers.",
        )
    for optimizer in listed("training_state", optimizers):
        for group in optimizer.param_groups:
            members = [_name(names, parameter) for parameter in group["params"]]
            _set_options(group, members, [entries[name]["options"].value for name in members])
            for parameter, name in zip(group["params"], members, strict=True):
                _set_state(optimizer, group, parameter, entries[name]["state"])


def model_state(model: nn.Module) -> dict[str, Any]:
    """A module's parameters, persistent buffers and extra state by name; the tensors are its own."""
    return {_unwrapped(name): value for name, value in model.state_dict(keep_vars=True).items()}


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Give a module its state. Tensors that are its own already stay as they are."""
    wrapped = {_unwrapped(name): name for name in model.state_dict(keep_vars=True)}
    try:
        model.load_state_dict({wrapped.get(name, name): value for name, value in state.items()})
    except RuntimeError as error:
        raise CheckpointError(
            "set_training_state", f"{error}.", "Build the model as it was when it was saved."
        ) from error


def _set_options(group: dict[str, Any], members: Sequence[str], options: Sequence[dict[str, Any]]) -> None:
    if not options:
        return
    for name, other in zip(members, options, strict=True):
        if pack(other) != pack(options[0]):
            raise CheckpointError(
                "set_training_state",
                f"{members[0]!r} and {name!r} are in one group now, but had options {options[0]} and {other}.",
                "Group the parameters as they were, or make their options equal in the state.",
            )
    for key, value in options[0].items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].copy_(torch.as_tensor(value))  # a captured graph may hold on to the tensor
        else:
            group[key] = value


def _set_state(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, state: Any) -> None:
    if isinstance(state, Unfilled):
        optimizer.state.pop(parameter, None)
        return
    # Fused and capturable optimizers count steps on the device, the others on the CPU.
    device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    optimizer.state[parameter] = {
        key: value.to(device) if key == "step" and isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


class _Maker:
    """Makes the tensors of a parameter's state: those of its shape lie as it does, the rest is plain."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __call__(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        parameter = self._parameter
        if key == "step" or shape != tuple(parameter.shape):
            return make_plain(key, shape, dtype)
        if not isinstance(parameter, DTensor):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        with torch.no_grad():
            local = torch.empty_like(parameter.to_local(), dtype=dtype)
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )


def _parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    check_model("training_state", model)
    return {parameter: _unwrapped(name) for name, parameter in model.named_parameters()}


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _members(optimizers: Optimizer | Iterable[Optimizer]) -> Iterator[tuple[Optimizer, dict[str, Any], torch.Tensor]]:
    for optimizer in listed("training_state", optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter


def _name(names: dict[torch.Tensor, str], parameter: torch.Tensor) -> str:
    if parameter not in names:
        raise CheckpointError(
            "training_state",
            f"an optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not.",
            "Make the optimizer after the model has been sharded, from its parameters.",
        )
    return names[parameter]
