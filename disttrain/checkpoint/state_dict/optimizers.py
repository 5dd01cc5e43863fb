"""The state dict of optimizers by the names of parameters, which torch's own has by number, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from disttrain.checkpoint.state_dict.flat import flattened, is_flat, unflattened
from disttrain.checkpoint.state_dict.names import parameter_names
from disttrain.checkpoint.state_dict.options import StateDictOptions
from disttrain.checkpoint.state_dict.whole import Path, broadcast_whole, gathered, laid_as, mapped, transport_device
from disttrain.errors import ShapeError, StateDictError
from disttrain.process_group.calls.packing import pack

_NOT_STRICT = "Save the state of the same optimizers, or give StateDictOptions(strict=False)."


@torch.no_grad()
def optimizers_state_dict(model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions) -> Any:
    """`{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}`, or flat; the tensors are the optimizers'.

    An optimizer that has taken no step gets its state first, see `fill_state`.
    """
    names = parameter_names(model)
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        fill_state(optimizer)
        name_of = dict(enumerate(_name(names, parameter) for parameter in _parameters(optimizer)))
        optimizer_state = optimizer.state_dict()
        for key, value in optimizer_state["state"].items():
            name = name_of.get(key, key)
            if name in merged["state"]:
                raise StateDictError(
                    "get_state_dict", f"parameter {name!r} is in two optimizers.", "Let one of them have it."
                )
            merged["state"][name] = value
        groups = [
            {**group, "params": [name_of[key] for key in group["params"]]} for group in optimizer_state["param_groups"]
        ]
        merged["param_groups"] += groups
    if options.flatten_optimizer_state_dict:
        merged = flattened(merged)
    return gathered(merged, is_full=options.full_state_dict, cpu_offload=options.cpu_offload)


@torch.no_grad()
def load_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any], options: StateDictOptions
) -> None:
    """Give the optimizers their parts of `state`, which stays as it is.

    Options are found by parameter, so groups may have been others. Collective with broadcast_from_rank0: every rank.
    """
    names = parameter_names(model)
    for optimizer in optimizers:
        fill_state(optimizer)
    if options.full_state_dict:
        state = _laid(names, optimizers, state, options)
    if not state:
        raise StateDictError("set_state_dict", "the optimizers' state dict is empty.", _NOT_STRICT)
    if is_flat(state):
        state = unflattened(state, {name for of_one in names.values() for name in of_one})
    if not {"state", "param_groups"} <= set(state):
        raise StateDictError(
            "set_state_dict", f"the optimizers' state dict has {sorted(map(str, state))[:8]}.", _WHAT_IT_HAS
        )
    for optimizer in optimizers:
        part = state if _is_by_number(state) else _part(names, optimizer, state, options.strict)
        optimizer.load_state_dict(dict(part))


_WHAT_IT_HAS = 'Give what get_optimizer_state_dict returned: "state" and "param_groups", or both flattened.'


def fill_state(optimizer: Optimizer) -> None:
    """Have an optimizer make its state by a step with gradients and rates of zero, as torch's functions do.

    Nothing happens where it has some, or where there are gradients: it is then one without a state. The count of its
    steps, where it has one, begins with that step.
    """
    parameters = _parameters(optimizer)
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        # Some optimizers also write to parameters without gradients, in proportion to the rate.
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        optimizer.step(closure=_zero)  # LBFGS, and others that look ahead, need one
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


def _zero() -> float:
    """A loss that leaves gradients as they are."""
    return 0.0


def _laid(
    names: Mapping[torch.Tensor, Sequence[str]],
    optimizers: Sequence[Optimizer],
    state: Mapping[str, Any],
    options: StateDictOptions,
) -> Mapping[str, Any]:
    """Whole tensors as the optimizers' own lie."""
    current: dict[str, torch.Tensor] = {}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for name in names.get(parameter, ()):

                def note(path: Path, tensor: torch.Tensor, name: str = name) -> None:
                    current[".".join(map(str, ("state", name, *path)))] = tensor

                mapped(values, note)
    devices = [tensor.device for tensor in current.values() if tensor.ndim] or [tensor.device for tensor in names]
    device = devices[0] if devices else torch.device("cpu")

    parameters = {name: parameter for parameter, of_one in names.items() for name in of_one}

    def place(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        key = ".".join(map(str, path))
        return laid_as(current.get(key, _like_its_parameter(key, tensor, parameters)), tensor, device)

    if options.broadcast_from_rank0:
        return broadcast_whole(dict(state), place, transport_device(device))
    laid: dict[str, Any] = mapped(dict(state), place)
    return laid


def _like_its_parameter(key: str, whole: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The tensor that an optimizer without a state will have at `key` ("state", a parameter's name, what there is of
    it, joined by dots): of the parameter's shape, it lies as the parameter does."""
    name = key.removeprefix("state.")
    while "." in name:
        name = name.rpartition(".")[0]
        parameter = parameters.get(name)
        if parameter is not None:
            return torch.empty_like(parameter, dtype=whole.dtype) if parameter.shape == whole.shape else None
    return None


def _part(
    names: Mapping[torch.Tensor, Sequence[str]], optimizer: Optimizer, state: Mapping[str, Any], is_strict: bool
) -> dict[str, Any]:
    """One optimizer's part of the state of all."""
    group_of = {name: group for group in state["param_groups"] for name in group["params"]}
    empty = iter([group for group in state["param_groups"] if not group["params"]])
    states: dict[Any, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        members = []
        for parameter in group["params"]:
            name = _name(names, parameter, group_of)
            members.append(name)
            if name in state["state"]:
                states[name] = state["state"][name]
            elif is_strict and parameter.requires_grad and optimizer.state.get(parameter):
                raise StateDictError("set_state_dict", f"the state of parameter {name!r} is missing.", _NOT_STRICT)
        missing = [name for name in members if name not in group_of]
        if missing and is_strict:
            raise StateDictError("set_state_dict", f"no group has parameter {missing[0]!r}.", _NOT_STRICT)
        saved = [group_of[name] for name in members if name in group_of] if members else [next(empty, group)]
        groups.append({**group, **_options(members, saved), "params": members})
    others = {key: value for key, value in state["state"].items() if not isinstance(key, str)}
    return {"state": {**states, **others}, "param_groups": groups}


def _options(members: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options that one group of parameters had, in whichever groups they were."""
    every = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    for name, options, group in zip(members, every, groups, strict=False):
        if group is not groups[0] and not _are_alike(options, every[0]):
            raise StateDictError(
                "set_state_dict",
                f"{members[0]!r} and {name!r} are in one group now, but had options {every[0]} and {options}.",
                "Group the parameters as they were, or make their options equal in the state.",
            )
    return every[0] if every else {}


def _are_alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    if first.keys() != second.keys():
        return False
    try:
        return all(pack(first[key]) == pack(second[key]) for key in first)
    except ShapeError:  # an option that is no plain value
        return bool(first == second)


def _is_by_number(state: Mapping[str, Any]) -> bool:
    """True for a state dict of an optimizer's own form, which torch's functions leave as it is."""
    members = [name for group in state["param_groups"] for name in group["params"]]
    return bool(members) and all(isinstance(member, int) for member in members)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _name(
    names: Mapping[torch.Tensor, Sequence[str]], parameter: torch.Tensor, preferred: Mapping[str, Any] | None = None
) -> str:
    """A parameter's name: where it is tied the one that is known, else the first."""
    if parameter not in names:
        raise StateDictError(
            "get_state_dict",
            f"an optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not.",
            "Make the optimizer after the model has been sharded, from its parameters.",
        )
    aliases = names[parameter]
    return next((name for name in aliases if name in (preferred or ())), aliases[0])
