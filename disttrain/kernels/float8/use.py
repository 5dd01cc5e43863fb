"""One call that lets a model's linear layers multiply in float8."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from disttrain.console import write
from disttrain.errors import ShapeError
from disttrain.kernels.float8.linear import GRAD_DTYPE, Float8Linear, Recipe
from disttrain.kernels.float8.reference import LINE
from disttrain.kernels.linear_choice import Filter, choose_linears
from disttrain.kernels.use import Replaced


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
    layers = choose_linears("use_float8", model, Float8Linear, _obstacle, filter, report)
    for _, layer in layers:
        layer.__class__ = Float8Linear
        layer.recipe = recipe  # type: ignore[assignment]  # the stubs know tensors and modules alone
    return tuple(Replaced(name, "float8 linear") for name, _ in layers)


def _obstacle(layer: nn.Linear) -> str:
    if layer.out_features % LINE or layer.in_features % LINE:
        return f"sizes are no multiples of {LINE}"
    return "" if layer.weight.is_floating_point() else f"the weight is {layer.weight.dtype}"
