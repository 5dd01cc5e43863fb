"""A model that has been cut: one module per stage, and what ties them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from disttrain.errors import ScheduleError
from disttrain.pipelining.runtime.routes import Value
from disttrain.pipelining.schedule.schedule import Wiring
from disttrain.pipelining.stage import PipelineStage
from disttrain.process_group import ProcessGroup


@dataclass(frozen=True)
class TiedWeight:
    """A parameter that several stages have: in one process the same object, on several ranks copies. Their gradients
    are to be added up. `names`: of each of these stages, the names that it has there."""

    names: Mapping[int, tuple[str, ...]]

    @property
    def label(self) -> str:
        """Tells it from the others, on all ranks alike."""
        stage = min(self.names)
        return f"{stage}:{self.names[stage][0]}"


@dataclass(frozen=True)
class SplitModel:
    """The stages' modules, whose parameters and buffers have the names that they have in the whole model.

    `wiring` is for the schedule's passes; `tied` says which parameters its ties are about; `inputs`, of each stage, the
    values that it is given, None where these are what the one before returns.
    """

    stages: tuple[nn.Module, ...]
    wiring: Wiring
    tied: tuple[TiedWeight, ...]
    inputs: tuple[tuple[Value, ...] | None, ...] = ()

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: ProcessGroup | None = None
    ) -> PipelineStage:
        """One of the stages, with its inputs and tied weights, for the rank that runs it.

        Its module moves to `device`, unless its parameters are on the meta device: those come later. All ranks build
        their stages of the same model, cut alike.
        Raises: ScheduleError when there is no such stage.
        """
        num_stages = len(self.stages)
        if not 0 <= stage_index < num_stages:
            raise ScheduleError(
                "build_stage", f"There is no stage {stage_index}.", f"There are {num_stages}, and the first is 0."
            )
        module = self.stages[stage_index]
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(device)
        tied = {weight.label: weight.names[stage_index][0] for weight in self.tied if stage_index in weight.names}
        inputs = self.inputs[stage_index] if self.inputs else None
        return PipelineStage(module, stage_index, num_stages, device, group=group, inputs=inputs, tied=tied)


def find_tied(stages: Sequence[nn.Module]) -> tuple[TiedWeight, ...]:
    """The parameters that more than one stage has."""
    names: dict[nn.Parameter, dict[int, tuple[str, ...]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            of_stage = names.setdefault(parameter, {})
            of_stage[index] = (*of_stage.get(index, ()), name)
    return tuple(TiedWeight(of_stages) for of_stages in names.values() if len(of_stages) > 1)


def wired(skips: Sequence[tuple[int, int]], tied: Sequence[TiedWeight]) -> Wiring:
    """The wiring of stages with these skips and ties."""
    return Wiring(tuple(sorted(set(skips))), tuple(sorted({tuple(sorted(weight.names)) for weight in tied})))
