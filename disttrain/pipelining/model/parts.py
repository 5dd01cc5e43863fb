"""Finds the parts of an ordinary model: modules before its blocks, the blocks, modules after them, and helpers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from disttrain.errors import ScheduleError
from disttrain.pipelining.schedule.balance import BlockCosts

_OPERATION = "pipelining.split_blocks"


@dataclass(frozen=True)
class Parts:
    """`blocks` by their names in the model; one may stand there twice. All modules outside them that compute
    activations stand in `before` or `after`."""

    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]


def find_parts(model: nn.Module, blocks: str | None = None) -> Parts:
    """Tell a model's parts by its blocks and by the order in which modules were registered.

    Modules with parameters, and torch's own layers, compute activations. All others, such as a table of positions, are
    helpers.

    Args: blocks  the name of what holds the blocks, "" for the model; default: the largest of like modules.
    Raises: ScheduleError when there are no blocks, or parameters beside the modules.
    """
    name = _find_blocks(model) if blocks is None else blocks
    try:
        container = model.get_submodule(name)
    except AttributeError:
        raise ScheduleError(_OPERATION, f"The model has no module {name!r}.", "Name what holds its blocks.") from None
    if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        raise ScheduleError(
            _OPERATION,
            f"{name!r} is a {type(container).__name__}.",
            "Name a ModuleList, ModuleDict or Sequential that holds the blocks.",
        )
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    outer = model
    for step in name.split(".") if name else ():
        _refuse_parameters(outer)
        side = before
        for child_name, child in outer.named_children():
            if child_name == step:
                side = after
            elif _computes(child):
                side.append(child)
        outer = outer.get_submodule(step)
    _refuse_parameters(outer)
    prefix = f"{name}." if name else ""
    keys = container.keys() if isinstance(container, nn.ModuleDict) else range(len(container))
    names = tuple(f"{prefix}{key}" for key in keys)
    return Parts(names, tuple(map(model.get_submodule, names)), tuple(before), tuple(after))


def estimated_costs(parts: Parts) -> BlockCosts:
    """Costs are the elements of all matrices in products, to which time is nearly proportional."""
    return BlockCosts(
        tuple(_matrix_elements(block) for block in parts.blocks),
        sum(_matrix_elements(module) for module in parts.before),
        sum(_matrix_elements(module) for module in parts.after),
    )


def measure_costs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: str | None = None,
    num_runs: int = 3,
) -> BlockCosts:
    """Seconds of each block's forward, and of what comes before and after: the fastest of `num_runs`, after one more.

    The model, on the device that it is to run on, is called with the arguments of one microbatch, without gradients.
    """
    parts = find_parts(model, blocks)
    laps = _Laps(parts.blocks)
    try:
        runs = []
        for _ in range(num_runs + 1):
            laps.begin()
            with torch.no_grad():
                model(*args, **(kwargs or {}))
            laps.lap()
            runs.append(laps.lengths())
    finally:
        laps.end()
    best = [min(lengths) for lengths in zip(*runs[1:], strict=True)]
    # Between two blocks nearly nothing happens.
    return BlockCosts(tuple(best[1:-1:2]), best[0], best[-1])


@dataclass
class _Laps:
    """The times at which blocks begin and end."""

    blocks: Sequence[nn.Module]
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._hooks = [
            hook
            for block in dict.fromkeys(self.blocks)
            for hook in (block.register_forward_pre_hook(self.lap), block.register_forward_hook(self.lap))
        ]

    def begin(self) -> None:
        self.times.clear()
        self.lap()

    def lap(self, *_: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())

    def lengths(self) -> list[float]:
        return [end - start for start, end in zip(self.times, self.times[1:], strict=False)]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _find_blocks(model: nn.Module) -> str:
    path = ""
    largest = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        members = list(module.values() if isinstance(module, nn.ModuleDict) else module)
        size = sum(parameter.numel() for member in members for parameter in member.parameters())
        if len(members) > 1 and len({type(member) for member in members}) == 1 and size > largest:
            path, largest = name, size
    if not largest and not isinstance(model, nn.Sequential):
        raise ScheduleError(
            _OPERATION,
            f"{type(model).__name__} has no list of like modules.",
            "Say which module holds the blocks: blocks='...'; or cut by disttrain.pipelining.pipeline.",
        )
    return path


def _computes(module: nn.Module) -> bool:
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return is_torchs or next(module.parameters(), None) is not None


def _refuse_parameters(module: nn.Module) -> None:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if names:
        raise ScheduleError(
            _OPERATION,
            f"{type(module).__name__} has a parameter {names[0]!r} of its own, which belongs to no stage.",
            "Put it into a module that runs before or after the blocks, or cut by disttrain.pipelining.pipeline.",
        )


def _matrix_elements(module: nn.Module) -> int:
    """A matrix that is used twice counts twice. Embeddings don't count, since their rows are only looked up; of experts
    in one tensor those that a token has, where a router says how many."""
    num_chosen = _experts_of_token(module)
    return sum(
        parameter.numel() * min(num_chosen, parameter.shape[0]) // parameter.shape[0]
        if parameter.ndim == 3 and num_chosen and parameter.shape[0]
        else parameter.numel()
        for submodule in module.modules()
        if not isinstance(submodule, nn.Embedding)
        for parameter in submodule.parameters(recurse=False)
        if parameter.ndim > 1
    )


def _experts_of_token(module: nn.Module) -> int:
    """Returns how many experts a router in the module chooses for a token; 0 where there is none that says so."""
    sources = [source for child in module.modules() for source in (child, getattr(child, "rule", None))]
    numbers = [getattr(source, name, None) for source in sources for name in ("top_k", "num_experts_per_tok")]
    return next((number for number in numbers if type(number) is int), 0)
