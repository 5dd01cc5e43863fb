"""Weights that stages on several ranks have in common: each tells the others its gradient, and all add up the same."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from disttrain.dtensor import DTensor
from disttrain.pipelining.runtime.routes import Routes
from disttrain.pipelining.stage import PipelineStage


class TiedGradients:
    """The gradients that one step gives to the tied weights of this rank."""

    def __init__(self, stages: Mapping[int, PipelineStage], routes: Routes) -> None:
        self._stages = stages
        self._labels = routes.labels
        self._received: dict[str, dict[int, torch.Tensor]] = {}
        # The .grad of earlier steps is already the sum over stages.
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        self._own: dict[str, tuple[int, nn.Parameter]] = {}
        for stage, module in sorted(stages.items()):
            for label in module.tied:
                # Stages of one rank share one parameter, whose gradient autograd has added up: the first one tells it.
                self._own.setdefault(label, (stage, module.tied_parameter(label)))

    def begin(self) -> None:
        """Before the first backward."""
        self._received.clear()
        self._earlier = {parameter: parameter.grad for _, parameter in self._own.values() if parameter.grad is not None}
        for parameter in self._earlier:
            parameter.grad = None

    def parts(self, source: int, target: int) -> list[torch.Tensor]:
        """Returns the gradients that `source`, a stage here, sends to `target`."""
        parts = []
        for label in self._labels[source, target]:
            first, parameter = self._own[label]
            part = _part(parameter.grad) if first == source else None
            parts.append(torch.zeros_like(self._like(label)) if part is None else part.contiguous())
        return parts

    def buffers(self, source: int, target: int) -> list[torch.Tensor]:
        """For what comes from `source` for `target`, a stage here."""
        return [torch.empty_like(part) for part in map(self._like, self._labels[source, target])]

    def take(self, source: int, target: int, parts: Sequence[torch.Tensor]) -> None:
        """Takes gradients that have come."""
        for label, part in zip(self._labels[source, target], parts, strict=True):
            self._received.setdefault(label, {})[source] = part

    def _like(self, label: str) -> torch.Tensor:
        """As large as the gradient of this weight, without gaps."""
        part = _part(self._own[label][1].detach())
        assert part is not None
        return part.contiguous()

    def forget(self) -> None:
        """A step has failed: restores the gradients of earlier ones."""
        for parameter, earlier in self._earlier.items():
            parameter.grad = earlier
        self._received, self._earlier = {}, {}

    def finish(self) -> None:
        """Add up, in the order of stages, which is the same on all ranks."""
        with torch.no_grad():
            for label, (stage, parameter) in self._own.items():
                others = self._received.get(label)
                if others is not None and parameter.requires_grad:
                    local_grad = _part(parameter.grad)
                    all_parts = dict(others) if local_grad is None else {**others, stage: local_grad}
                    parts = [part for _, part in sorted(all_parts.items())]
                    _set(parameter, functools.reduce(torch.add, parts))
            for parameter, earlier in self._earlier.items():
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._received, self._earlier = {}, {}


def find_problem(stages: Sequence[PipelineStage]) -> str:
    """Finds what is wrong with the tied weights of one rank; empty when nothing is."""
    first: dict[str, tuple[int, nn.Parameter]] = {}
    for stage in stages:
        for label in stage.tied:
            parameter = stage.tied_parameter(label)
            other, shared = first.setdefault(label, (stage.stage_index, parameter))
            if shared is not parameter:
                return f"stages {other} and {stage.stage_index} of one rank each have a copy of the tied {label!r}"
    return ""


def tied_forms(stage: PipelineStage) -> tuple[tuple[str, str], ...]:
    """Labels, and what must be alike on all ranks."""
    return tuple((label, _form_text(stage.tied_parameter(label))) for label in sorted(stage.tied))


def _form_text(parameter: nn.Parameter) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    lies = ""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        lies = f" as {parameter.placements} on {mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}"
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}{lies}{frozen}"


def _part(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _set(parameter: nn.Parameter, part: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        part = DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
            run_check=False,
        )
    parameter.grad = part
