"""Selects a model's linear layers that become another kind: all that can, but the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError

Filter = Callable[[str, nn.Linear], bool]


def choose_linears(
    operation: str,
    model: nn.Module,
    kind: type[nn.Linear],
    obstacle: Callable[[nn.Linear], str],
    filter: Filter | None,
    report: Callable[[str], None],
    grouped: Mapping[str, str] | None = None,
) -> list[tuple[str, nn.Linear]]:
    """The layers that become `kind`, by name, without those that are of it; says how many, and what is left and why.

    Left are weights that several modules share, subclasses of nn.Linear, layers with an `obstacle`, those that `filter`
    does not want, and without a filter the head: the last layer, where no list of blocks holds it.
    Args:   grouped  modules whose products are no linear layers', though they may have such, and why each is left;
                     empty for those that change, which is not for this function.
    Raises: ShardingError for a weight that is a DTensor already.
    """
    grouped = grouped or {}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(_is_within(name, outer) for outer in grouped)
    }
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor):
            problem = f"the weight of {name} lies as {layer.weight._spec.layout}."
            raise ShardingError(operation, problem, "Call it before parallelize_module and fully_shard.")
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    head = None if filter is not None else _head(model, layers)
    chosen: list[tuple[str, nn.Linear]] = []
    skipped: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if type(layer) not in (nn.Linear, kind):
            reason = "they are subclasses of nn.Linear"
        elif owners[id(layer.weight)] > 1:
            reason = "other modules share the weight"
        elif name == head:
            reason = "it is the head"
        elif filter is not None and not filter(name, layer):
            reason = "the filter says so"
        else:
            reason = obstacle(layer)
        if reason:
            skipped.setdefault(reason, []).append(name)
        elif type(layer) is nn.Linear:
            chosen.append((name, layer))
    report(f"{operation}: {type(model).__name__}: {len(chosen)} linear layers")
    for name, reason in _others(model, grouped):
        skipped.setdefault(reason, []).append(name)
    for reason, names in skipped.items():
        report(f"{operation}: left {_listed(names)}: {reason}")
    return chosen


def _others(model: nn.Module, grouped: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Modules that multiply by something else than linear layers, and why they are left."""
    yield from ((name, reason) for name, reason in grouped.items() if reason)
    for name, module in model.named_modules():
        if name not in grouped and _has_stacked_weights(module):
            yield name, "they hold the weights of several experts in one tensor"


def _is_within(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _has_stacked_weights(module: nn.Module) -> bool:
    parameters = module.parameters(recurse=False)
    # The weights of convolutions have three dims and more.
    return not hasattr(module, "kernel_size") and any(weight.ndim == 3 for weight in parameters)


def _head(model: nn.Module, layers: dict[str, nn.Linear]) -> str | None:
    last = next(reversed(layers), None)
    is_in_list = last is not None and any(
        isinstance(module, nn.ModuleList | nn.ModuleDict) for module in _above(model, last)
    )
    return None if is_in_list else last


def _above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    module = model
    for part in name.split(".") if name else ():
        yield module
        module = module.get_submodule(part)


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"
