"""An ordinary stack of blocks, cut between them.

Each stage runs the model's own forward. Modules of other stages are replaced by stand-ins without parameters that
return their input. Modules that compute no activations, such as tables of positions, are on every stage. So names stay
the same, and each stage computes masks, rotary angles and the like for its own blocks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from disttrain._python.made_classes import made_by
from disttrain.arguments import arguments_of
from disttrain.errors import ScheduleError
from disttrain.pipelining.model.parts import Parts, estimated_costs, find_parts
from disttrain.pipelining.model.stages import SplitModel, find_tied, wired
from disttrain.pipelining.schedule.balance import BlockCosts, balance, check_boundaries


@arguments_of("pipelining.split_blocks", remedy="Give a model, a number, a name, and lists of numbers, or BlockCosts.")
def split_blocks(
    model: nn.Module,
    num_stages: int,
    *,
    blocks: str | None = None,
    boundaries: Sequence[int] | None = None,
    costs: BlockCosts | None = None,
) -> SplitModel:
    """Cut a model of the form embedding, blocks, norm, head, such as those of transformers, into stages.

    A stage takes what the one before returns as its first argument, and the model's other arguments as keywords; all
    but the last return one tensor, the input of the next. Blocks take that tensor first and return it alone. Models
    with `inputs_embeds` get it by that name. The stages share the model's parameters and blocks.
    Args:   blocks      name of the ModuleList, ModuleDict or Sequential; default: the largest of like modules;
            boundaries  the first block of each stage but the first; default: so that stages cost alike;
            costs       of the blocks, measured by `measure_costs`, say; default: by the size of their matrices.
    Raises: ScheduleError when no blocks are found, there are too few, or parameters belong to no stage: then cut by
            `pipeline`.
    """
    parts = find_parts(model, blocks)
    if boundaries is None:
        costs = costs or estimated_costs(parts)
        if len(costs.blocks) != len(parts.blocks):
            raise ScheduleError(
                "pipelining.split_blocks",
                f"There are {len(parts.blocks)} blocks, and costs of {len(costs.blocks)}.",
                "Give one cost for each.",
            )
        cuts = balance(costs, num_stages)
    else:
        cuts = check_boundaries(boundaries, num_stages, len(parts.blocks))
    ends = [0, *cuts, len(parts.blocks)]
    stages = tuple(
        _stage(model, parts, range(first, end), is_first=index == 0, is_last=index == num_stages - 1)
        for index, (first, end) in enumerate(itertools.pairwise(ends))
    )
    tied = find_tied(stages)
    return SplitModel(stages, wired((), tied), tied)


class StandIn(nn.Module):
    """Stands in for a module of another stage: passes activations on, and adds nothing to others."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        # A model may read an attribute of its blocks that says their kind.
        plain = {name: value for name, value in vars(replaced).items() if isinstance(value, str | int | float | None)}
        vars(self).update({name: value for name, value in plain.items() if not name.startswith("_")})

    def forward(self, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


def _stage(model: nn.Module, parts: Parts, block_range: range, *, is_first: bool, is_last: bool) -> nn.Module:
    own_blocks = [parts.blocks[index] for index in block_range]
    stage_modules = {*own_blocks, *(parts.before if is_first else ()), *(parts.after if is_last else ())}
    others = [module for module in (*parts.before, *parts.blocks, *parts.after) if module not in stage_modules]
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    memo |= {id(module): module for module in stage_modules}
    memo |= {id(module): StandIn(module) for module in others}
    stage = copy.deepcopy(model, memo)
    for index, name in enumerate(parts.names):
        # A block that stands in several places may be this stage's in some of them.
        if index not in block_range and parts.blocks[index] in stage_modules:
            container, _, key = name.rpartition(".")
            stage.get_submodule(container).add_module(key, StandIn(parts.blocks[index]))
    takes_embeddings = "inputs_embeds" in inspect.signature(model.forward).parameters
    stage.__class__ = _joined(cast(Any, type(model)))
    stage._part = _Part(  # type: ignore[assignment]
        takes="inputs_embeds" if takes_embeddings and not is_first else None,
        takes_no_cache="use_cache" in inspect.signature(model.forward).parameters,
        is_last=is_last,
        unchecked=list(own_blocks),
    )
    return stage


@dataclass
class _Part:
    """The arguments of a stage. `unchecked`: blocks that have not yet been seen to return one tensor."""

    takes: str | None
    takes_no_cache: bool
    is_last: bool
    unchecked: list[nn.Module]


class _Stage(nn.Module):
    """The whole model's forward, on what is there of it."""

    _part: _Part

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        if part.takes_no_cache:
            kwargs.setdefault("use_cache", False)
        if part.takes is not None:
            kwargs[part.takes] = x
        else:
            args = (x, *args)
        outputs = self._checked(args, kwargs) if part.unchecked else super().forward(*args, **kwargs)
        if part.is_last or isinstance(outputs, torch.Tensor):
            return outputs
        return outputs[0]

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first forward: stand-ins return a tensor, so blocks must."""
        hooks = [block.register_forward_hook(_check_output) for block in self._part.unchecked]
        try:
            outputs = super().forward(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        self._part.unchecked.clear()
        return outputs


def _check_output(block: nn.Module, _inputs: Any, output: Any) -> None:
    if not isinstance(output, torch.Tensor):
        raise ScheduleError(
            "pipelining.split_blocks",
            f"A {type(block).__name__} returns a {type(output).__name__}, and not one tensor, which the next takes.",
            "Cut this model by disttrain.pipelining.pipeline.",
        )


@functools.cache
def _joined(cls: Any) -> Any:
    return made_by(type(f"StageOf{cls.__name__}", (_Stage, cls), {}), _joined, cls)
