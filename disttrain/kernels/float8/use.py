"""One call that lets a model's linear layers multiply in float8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from disttrain.console import write
from disttrain.errors import ShapeError
from disttrain.kernels.float8.gain import Gain, measured, pays
from disttrain.kernels.float8.linear import GRAD_DTYPE, Float8Linear, Recipe
from disttrain.kernels.float8.reference import LINE
from disttrain.kernels.linear_choice import Filter, choose_linears
from disttrain.kernels.use import Replaced
from disttrain.process_group.current import has_world
from disttrain.settings import WORLD_SIZE

_NOT_ASKED: Final = "experts' products change with experts=True alone"


def use_float8(
    model: nn.Module,
    recipe: Recipe = "tensorwise",
    *,
    filter: Filter | None = None,
    num_tokens: int | None = 8192,
    experts: bool = False,
    report: Callable[[str], None] = write,
) -> tuple[Replaced, ...]:
    """Let the linear layers of `model`, which stays the same object with the same parameters and names, multiply in
    float8, forward and backward. Under `fully_shard` their weights are gathered in float8.

    Left alone are sizes that are no multiples of 16, weights that several modules share, subclasses of nn.Linear, and
    the head: the model's last linear layer, where no list of blocks holds it. Where the model is on a GPU, or on meta
    beside one, so are layers that float8 does not make at least 5 % faster: each size is measured once, all casts
    included, and ranks agree. Measured is the GPU's time: without `compile_blocks` or `capture_step` the host may take
    longer, which the report says.

    Call it before `parallelize_module` and `fully_shard`, and after `init_process_group`.

    Args:    recipe  "tensorwise": one scale per matrix; "rowwise": one per row, slower and of more precision.
             filter  says of a layer's name and the layer whether it is to change; then the head is not left alone,
                     and nothing is measured.
             num_tokens  rows that a layer multiplies at once, for the measurement; None: all that can be are changed.
             experts  layers of `disttrain.experts`, also those that `use_experts` took, multiply in float8 as well, but
                     not for their weights' gradients. Nothing is measured: see `benchmarks/experts_gpu.py --float8`.
             report  is given the lines that say what was changed and what was left; the default prints them.
    Returns: all that was changed, by the modules' names.
    Raises:  ShapeError for another recipe, or no tokens; ShardingError for a weight that is a DTensor already.
    """
    if recipe not in GRAD_DTYPE:
        raise ShapeError("use_float8", f"the recipe is {recipe!r}.", "Give one of tensorwise, rowwise.")
    if num_tokens is not None and num_tokens < 1:
        raise ShapeError("use_float8", f"num_tokens is {num_tokens}.", "Give 1 or more, or None to measure nothing.")
    is_measured = filter is None and num_tokens is not None
    if is_measured and not has_world() and (WORLD_SIZE.read() or 1) > 1:
        report("use_float8: nothing is measured before init_process_group, since ranks could not agree")
        is_measured = False
    gains: dict[Gain, bool] = {}
    grouped = dict(_expert_layers(model))
    reasons = {name: layer.float8_obstacle() if experts else _NOT_ASKED for name, layer in grouped.items()}

    def obstacle(layer: nn.Linear) -> str:
        reason = _obstacle(layer)
        device = _device(layer) if is_measured and type(layer) is nn.Linear else None
        if reason or device is None or num_tokens is None:
            return reason
        gain = measured(layer.out_features, layer.in_features, layer.bias is not None, num_tokens, recipe, device)
        if gain not in gains:
            gains[gain] = pays(gain, recipe)
        return "" if gains[gain] else str(gain)

    layers = choose_linears("use_float8", model, Float8Linear, obstacle, filter, report, reasons)
    _report_gains([gain for gain, is_used in gains.items() if is_used], report)
    for _, layer in layers:
        layer.__class__ = Float8Linear
        layer.recipe = recipe  # type: ignore[assignment]  # the stubs know tensors and modules alone
    taken = [name for name, reason in reasons.items() if not reason]
    for name in taken:
        grouped[name].float8 = recipe
    if taken:
        report(f"use_float8: {len(taken)} layers of experts")
    kinds = (("float8 linear", [name for name, _ in layers]), ("float8 experts", taken))
    return tuple(Replaced(name, kind) for kind, names in kinds for name in names)


def _expert_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """By what they are asked: they are made above this package."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "float8_obstacle"))


def _report_gains(gains: list[Gain], report: Callable[[str], None]) -> None:
    for gain in gains:
        report(f"use_float8: {gain}")
    slow = [gain.host_s for gain in gains if gain.host_s > gain.float8_s]
    if slow:
        report(f"use_float8: one by one, launches of a layer take {1e3 * max(slow):.3f} ms: take compile_blocks")


def _device(layer: nn.Linear) -> torch.device | None:
    """The GPU that the layer will be on; None where that is none."""
    device = layer.weight.device
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device if device.type == "cuda" else None


def _obstacle(layer: nn.Linear) -> str:
    if layer.out_features % LINE or layer.in_features % LINE:
        return f"sizes are no multiples of {LINE}"
    return "" if layer.weight.is_floating_point() else f"the weight is {layer.weight.dtype}"
