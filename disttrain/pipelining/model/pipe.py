"""A model cut along its graph, as torch.export sees it; names are those of torch.distributed.pipelining.

Where `split_blocks` needs a model of a known form, this takes any that can be exported, skip connections included: a
stage is what lies between two marks, and whatever a later stage uses of an earlier one is sent to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from disttrain.errors import ScheduleError
from disttrain.pipelining._torch import flatten, unflatten
from disttrain.pipelining.model.graph_stages import cut_graph
from disttrain.pipelining.model.stages import SplitModel, find_tied, wired
from disttrain.pipelining.runtime.routes import Value
from disttrain.pipelining.stage import PipelineStage
from disttrain.process_group import ProcessGroup

_OPERATION = "pipelining.pipeline"

_library = torch.library.Library("disttrain", "FRAGMENT")
_library.define("pipe_split() -> ()")
_library.impl("pipe_split", lambda: None, "BackendSelect")
torch.library.register_fake("disttrain::pipe_split", lambda: None, lib=_library)
fx.node.has_side_effect(torch.ops.disttrain.pipe_split.default)


def pipe_split() -> None:
    """To be called in a model's forward: here a stage ends. Does nothing else."""
    torch.ops.disttrain.pipe_split()


class SplitPoint(Enum):
    """The point at which a stage begins: before a submodule runs, or after it."""

    BEGINNING = 1
    END = 2


class Pipe:
    """A model in stages. Called as the model is, it runs them one after the other, on this process.

    `model` has the stages' modules, their wiring and tied weights. Of each stage, `inputs` are the values that it is
    given, in this order, as (stage, which of its outputs); the first stage is called as the model is, the last returns
    what the model returns, and others return a tuple, or a tensor if it is one.
    """

    def __init__(self, model: SplitModel, inputs: tuple[tuple[Value, ...], ...]) -> None:
        self.model = model
        self.inputs = inputs

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: ProcessGroup | None = None
    ) -> PipelineStage:
        """One of the stages for the rank that runs it, with its inputs and tied weights (`SplitModel.build_stage`).

        Keyword arguments are those of the whole model, on the rank of the first stage.
        """
        return self.model.build_stage(stage_index, device, group)

    @property
    def num_stages(self) -> int:
        return len(self.model.stages)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of one stage. Raises: ScheduleError when there is no such stage."""
        if not 0 <= stage_idx < self.num_stages:
            raise ScheduleError(
                "Pipe.get_stage_module",
                f"There is no stage {stage_idx}.",
                f"There are {self.num_stages}, and the first is 0.",
            )
        return self.model.stages[stage_idx]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        output = None
        for index, stage in enumerate(self.model.stages):
            inputs = [outputs[source][which] for source, which in self.inputs[index]]
            output = stage(*inputs) if index else stage(*args, **kwargs)
            outputs.append((output,) if isinstance(output, torch.Tensor) else output)
        return output


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Cut a model into stages along its graph.

    Parameters and buffers are the model's own and have its names; a stage has those that it uses, so a tied weight may
    be in several. A weight of two names has the first one. A stage without any operator is left out.
    Args:   mb_args, mb_kwargs  those of one microbatch: the graph is for such shapes, and for the mode, training or
                                not, in which the model is now;
            split_spec    by the name of a submodule, whether to cut before or after it;
            split_policy  instead: given the graph, returns it with calls of `torch.ops.disttrain.pipe_split` in it.
    Raises: ScheduleError when both are given, a name is unknown, the model cannot be exported, or something other than
            a tensor would have to be sent.
    """
    if split_spec is not None and split_policy is not None:
        raise ScheduleError(_OPERATION, "Both split_spec and split_policy are given.", "Leave one out.")
    try:
        with _marked(module, split_spec or {}):
            exported = torch.export.export(module, mb_args, dict(mb_kwargs or {}))
    except ScheduleError:
        raise
    # Whatever a model does may fail in a way of its own, and torch has no common class for what cannot be exported.
    except Exception as error:
        raise ScheduleError(
            _OPERATION,
            f"{type(module).__name__} cannot be exported as one graph: {type(error).__name__}.",
            "The error above says where; or cut the model by split_blocks, or by hand.",
        ) from error
    traced = exported.module(check_guards=False)
    assert isinstance(traced, fx.GraphModule)
    if split_policy is not None:
        traced = split_policy(traced)
    stages, inputs = cut_graph(traced, module, torch.ops.disttrain.pipe_split.default)
    spec = exported.call_spec
    names = list(mb_kwargs or {})

    def flat_arguments(_stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if set(kwargs) != set(names):
            raise ScheduleError("Pipe", f"Keywords are {sorted(kwargs)}.", f"Give those of the example: {names}.")
        leaves, structure = flatten((args, {name: kwargs[name] for name in names}))
        if structure != spec.in_spec:
            raise ScheduleError("Pipe", "The arguments are not nested as those of the example.", "Give such.")
        return tuple(leaves), {}

    def nested_outputs(_stage: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return unflatten(outputs, spec.out_spec)

    def no_keywords(_stage: nn.Module, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        # Where a rank has the first stage and others, all are given its keywords.
        return args, {}

    stages[0].register_forward_pre_hook(flat_arguments, with_kwargs=True)
    for stage in stages[1:]:
        stage.register_forward_pre_hook(no_keywords, with_kwargs=True)
    stages[-1].register_forward_hook(nested_outputs)
    tied = find_tied(stages)
    skips = [(source, target) for target, sources in enumerate(inputs) for source, _ in sources if target > source + 1]
    return Pipe(SplitModel(stages, wired(skips, tied), tied, (None, *inputs[1:])), inputs)


@contextlib.contextmanager
def _marked(module: nn.Module, split_spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Within, these submodules call `pipe_split` before or after they run."""
    with contextlib.ExitStack() as hooks:
        for name, point in split_spec.items():
            try:
                submodule = module.get_submodule(name)
            except AttributeError:
                raise ScheduleError(
                    _OPERATION, f"The model has no submodule {name!r}.", "Name one of model.named_modules()."
                ) from None
            if point is SplitPoint.BEGINNING:
                handle = submodule.register_forward_pre_hook(_mark)
            else:
                handle = submodule.register_forward_hook(_mark)
            hooks.callback(handle.remove)
        yield


def _mark(*_: Any) -> None:
    pipe_split()
