"""One call that lets a model's linear layers multiply in float8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn

from disttrain.console import write
from disttrain.dtensor import DTensor
from disttrain.errors import ShapeError, ShardingError
from disttrain.kernels.float8_linear import GRAD_DTYPE, Float8Linear, Recipe
from disttrain.kernels.float8_twin import LINE
from disttrain.kernels.use import Replaced

Filter = Callable[[str, nn.Linear], bool]


def use_float8(
    model: nn.Module,
    recipe: Recipe = "tensorwise",
    *,
    filter: Filter | None = None,
    report: Callable[[str], None] = write,
) -> tuple[Replaced, ...]:
    """Let the linear layers of `model`, which stays the same object with the same parameters and names, multiply in
    float8, forward and backward. Under `fully_shard` their weights are gathered in float8.

    Left alone are sizes that are no multiples of 16, weights that several modules share, subclasses of nn.Linear, and
    the head: the model's last linear layer, where no list of blocks holds it.

    Call it before `parallelize_module` and `fully_shard`.

    Args:    recipe  "tensorwise": one scale per matrix; "rowwise": one per row, slower and of more precision.
             filter  says of a layer's name and the layer whether it is to change; then the head is not left alone.
             report  is given the lines that say what was changed and what was left; the default prints them.
    Returns: all that was changed, by the modules' names.
    Raises:  ShapeError for another recipe; ShardingError for a weight that is a DTensor already.
    """
    if recipe not in GRAD_DTYPE:
        raise ShapeError("use_float8", f"the recipe is {recipe!r}.", "Give one of tensorwise, rowwise.")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor):
            problem = f"the weight of {name} lies as {layer.weight._spec.layout}."
            raise ShardingError("use_float8", problem, "Call it before parallelize_module and fully_shard.")
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    head = None if filter is not None else _head(model, layers)
    changed: list[Replaced] = []
    left: dict[str, list[str]] = {}
    for name, layer in layers.items():
        reason = "it is the head" if name == head else _obstacle(name, layer, owners, filter)
        if reason:
            left.setdefault(reason, []).append(name)
        elif not isinstance(layer, Float8Linear):
            layer.__class__ = Float8Linear
            layer.recipe = recipe  # type: ignore[assignment]  # the stubs know tensors and modules alone
            changed.append(Replaced(name, "float8 linear"))
    report(f"use_float8: {type(model).__name__}: {len(changed)} linear layers, {recipe}")
    for reason, names in left.items():
        report(f"use_float8: left {_listed(names)}: {reason}")
    return tuple(changed)


def _obstacle(name: str, layer: nn.Linear, owners: Counter[int], filter: Filter | None) -> str:
    if type(layer) not in (nn.Linear, Float8Linear):
        return "they are subclasses of nn.Linear"
    if layer.out_features % LINE or layer.in_features % LINE:
        return f"sizes are no multiples of {LINE}"
    if owners[id(layer.weight)] > 1:
        return "other modules share the weight"
    if filter is not None and not filter(name, layer):
        return "the filter says so"
    return "" if layer.weight.is_floating_point() else f"the weight is {layer.weight.dtype}"


def _head(model: nn.Module, layers: dict[str, nn.Linear]) -> str | None:
    """The last linear layer, where it lies in no list of blocks."""
    last = next(reversed(layers), None)
    return None if last is None or any(_is_list(module) for module in _above(model, last)) else last


def _above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    module = model
    for part in name.split("."):
        yield module
        module = module.get_submodule(part)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"
