"""The functions of torch.distributed.checkpoint.state_dict: same names, arguments and results, for our DTensors.

Source: torch/distributed/checkpoint/state_dict.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from disttrain._python.garbage import uncollected
from disttrain.arguments import arguments_of
from disttrain.checkpoint.kinds import check_dict, check_model
from disttrain.checkpoint.kinds import listed as listed_of
from disttrain.checkpoint.state_dict.models import by_name, load_model, model_state_dict
from disttrain.checkpoint.state_dict.optimizers import load_optimizers, optimizers_state_dict
from disttrain.checkpoint.state_dict.options import StateDictOptions
from disttrain.errors import ArgumentError, StateDictError


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of a model and of its optimizers, by the names of parameters.

    The second is `{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{"params": [names], "lr": ..., ...}]}`, or
    `{}` where there are no optimizers. An optimizer without a state takes a step with rates and gradients of zero
    first, so that there is something to load into. Tensors are the model's and the optimizers' own, unless the options
    have others made. `submodules`, of which alone the first is then, is deprecated.
    Raises:  StateDictError for a parameter that is not the model's, or that two optimizers have.
    Collective with full_state_dict: every rank.
    """
    check_model("get_state_dict", model)
    chosen, listed = _chosen(options), listed_of("get_state_dict", optimizers)
    with uncollected():
        model_state = _model_state(model, chosen, submodules)
        return model_state, optimizers_state_dict(model, listed, chosen) if listed else {}


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The first of what `get_state_dict` returns."""
    check_model("get_model_state_dict", model)
    with uncollected():
        return _model_state(model, _chosen(options), submodules)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The second of what `get_state_dict` returns; `submodules` changes nothing, as in torch."""
    check_model("get_optimizer_state_dict", model)
    chosen, listed = _chosen(options), listed_of("get_optimizer_state_dict", optimizers)
    if submodules:
        _warn_of_submodules()
    _need(listed, "get_optimizer_state_dict")
    with uncollected():
        return dict(optimizers_state_dict(model, listed, chosen))


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Give a model and its optimizers what `get_state_dict` returned, of whatever parallelism, and a load filled.

    With full_state_dict tensors are whole, and each rank takes its parts of them. Call it before the backward, or after
    the step: an optimizer without a state takes a step with rates and gradients of zero first. The dicts stay as they
    are. An empty `model_state_dict` leaves the model alone, without optimizers `optim_state_dict` is not looked at.
    Returns: (missing_keys, unexpected_keys) of the model, as `nn.Module.load_state_dict`.
    Raises:  StateDictError for names and shapes that don't fit, unless strict is False.
    Collective with broadcast_from_rank0: every rank.
    """
    check_model("set_state_dict", model)
    check_dict("set_state_dict", "model_state_dict", model_state_dict)
    check_dict("set_state_dict", "optim_state_dict", optim_state_dict)
    chosen, listed = _chosen(options), listed_of("set_state_dict", optimizers)
    has_model = bool(model_state_dict) or chosen.broadcast_from_rank0
    if not has_model:
        _need(listed, "set_state_dict")
    with uncollected():
        if listed:
            load_optimizers(model, listed, optim_state_dict, chosen)
        named = by_name(model, model_state_dict) if has_model else {}
        return load_model(model, named, chosen) if has_model else nn.Module().load_state_dict({})


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Give a model what `get_model_state_dict` returned; see `set_state_dict`."""
    check_model("set_model_state_dict", model)
    check_dict("set_model_state_dict", "model_state_dict", model_state_dict)
    chosen = _chosen(options)
    with uncollected():
        return load_model(model, by_name(model, model_state_dict), chosen)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Give optimizers what `get_optimizer_state_dict` returned; see `set_state_dict`."""
    check_model("set_optimizer_state_dict", model)
    check_dict("set_optimizer_state_dict", "optim_state_dict", optim_state_dict)
    chosen, listed = _chosen(options), listed_of("set_optimizer_state_dict", optimizers)
    _need(listed, "set_optimizer_state_dict")
    with uncollected():
        load_optimizers(model, listed, optim_state_dict, chosen)


def _model_state(model: nn.Module, options: StateDictOptions, submodules: Iterable[nn.Module] | None) -> dict[str, Any]:
    if submodules is not None:
        with arguments_of("get_model_state_dict", remedy="Give submodules as a set of modules."):
            submodules = set(submodules)
    if submodules:
        _warn_of_submodules()
    return model_state_dict(model, options, submodules)


def _chosen(options: StateDictOptions | None) -> StateDictOptions:
    if not isinstance(options, StateDictOptions | None):
        raise ArgumentError("StateDictOptions", f"options is {options!r}.", "Give a StateDictOptions.")
    chosen = options or StateDictOptions()
    if chosen.broadcast_from_rank0 and not chosen.full_state_dict:
        raise StateDictError(
            "StateDictOptions",
            "broadcast_from_rank0 is True, full_state_dict is False: rank 0 broadcasts whole tensors.",
            "Set full_state_dict=True, too.",
        )
    return chosen


def _need(optimizers: list[Optimizer], operation: str) -> None:
    if not optimizers:
        raise StateDictError(operation, "there are no optimizers.", "Give the model's optimizer, or several.")


def _warn_of_submodules() -> None:
    warnings.warn("submodules= is deprecated: take what you need by name.", FutureWarning, stacklevel=4)
