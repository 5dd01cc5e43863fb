"""What a model becomes that is cut: one module per stage, and what ties them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from disttrain.pipelining.schedule import Wiring


@dataclass(frozen=True)
class TiedWeight:
    """A parameter that several stages have: in one process the same object, on several ranks copies. Their gradients
    are to be added up. `names`: of each of these stages, the names that it has there."""

    names: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class SplitModel:
    """The stages' modules, whose parameters and buffers have the names that they have in the whole model.

    `wiring` is for the schedule's passes; `tied` says which parameters its ties are about.
    """

    stages: tuple[nn.Module, ...]
    wiring: Wiring
    tied: tuple[TiedWeight, ...]


def find_tied(stages: Sequence[nn.Module]) -> tuple[TiedWeight, ...]:
    """The parameters that more than one stage has."""
    names: dict[nn.Parameter, dict[int, tuple[str, ...]]] = {}
    for place, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            of_stage = names.setdefault(parameter, {})
            of_stage[place] = (*of_stage.get(place, ()), name)
    return tuple(TiedWeight(of_stages) for of_stages in names.values() if len(of_stages) > 1)


def wired(skips: Sequence[tuple[int, int]], tied: Sequence[TiedWeight]) -> Wiring:
    """The wiring of stages with these skips and ties."""
    return Wiring(tuple(sorted(set(skips))), tuple(sorted({tuple(sorted(weight.names)) for weight in tied})))
