"""Models without tensors, for the machine of `fully_shard`: random nests, and a rank that minds its commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from disttrain.fsdp2.machine.commands import (
    Commands,
    DropGrads,
    DropPart,
    DropReductions,
    Finish,
    Free,
    Gather,
    Hide,
    Reduce,
    Show,
    Wait,
)
from disttrain.fsdp2.machine.group import Buckets, Bundle, Group
from disttrain.fsdp2.machine.model import Model
from disttrain.fsdp2.machine.unit import Unit


class CommandFailed(Exception):
    """As when a collective does."""


@dataclass(eq=False)
class Parameter:
    is_trained: bool
    num_due: int = 0
    """Gradients that backward passes have left, and that have not been reduced."""

    @property
    def has_grad(self) -> bool:
        return self.num_due > 0


@dataclass(eq=False)
class Parameters:
    """A group as the machine asks about it, and what has been done to it."""

    params: list[Parameter]
    reduces_as: int = 0
    has_unreduced: bool = False
    memory: str = "freed"
    is_shown: bool = False

    @property
    def has_grads(self) -> bool:
        return any(param.has_grad for param in self.params)


@dataclass(eq=False)
class Rank:
    """Carries commands out, and minds that they make sense. Fails after `fails_after` of them."""

    fails_after: int = -1
    num_reduced: int = 0
    num_under_way: int = 0

    def run(self, commands: Commands) -> None:
        for command in commands:
            if self.fails_after == 0:
                self.fails_after = -1
                raise CommandFailed
            self.fails_after -= 1
            self.carry_out(command)

    def carry_out(self, command: Any) -> None:
        match command:
            case Gather(needed, groups):
                assert needed in groups
                assert len(set(groups)) == len(groups)
                for group in groups:
                    assert group.facts.memory == "freed" or (group.facts.memory == "part" and len(groups) == 1)
                    group.facts.memory = "gathering"
            case Wait(group):
                for each in group.gathered_with:
                    _turn(each, "gathering", "unsharded")
            case Show(group) | Hide(group):
                _turn(group, "unsharded", "unsharded")
                group.facts.is_shown = isinstance(command, Show)
            case Free(group, keep_on):
                _turn(group, "unsharded", "freed" if keep_on is None else "part")
                group.facts.is_shown = False
            case DropPart(group):
                _turn(group, "part", "freed")
            case _:
                self._of_gradients(command)

    def _of_gradients(self, command: Any) -> None:
        match command:
            case DropGrads(group):
                for param in group.facts.params:
                    param.num_due = 0
            case Finish() | DropReductions():
                but_last_sum = isinstance(command, Finish) and command.but_last_sum
                self.num_under_way = min(self.num_under_way, int(but_last_sum))
            case Reduce(parts):
                assert len({group.facts.reduces_as for group, _ in parts}) == 1
                self.num_under_way += 1
                for param in (param for _, params in parts for param in params):
                    self.num_reduced += param.num_due
                    param.num_due = 0


def _turn(group: Group, before: str, after: str) -> None:
    assert group.facts.memory == before
    group.facts.memory = after


@dataclass(eq=False)
class Module:
    """A unit, or what is none, and the modules in it; what it computes with is used before them."""

    unit: Unit | None
    children: list[Module]
    times: int


def group_of(draw: st.DrawFn) -> Group:
    params = [Parameter(draw(st.sampled_from((True, True, True, False)))) for _ in range(draw(st.integers(1, 3)))]
    made = Group(Parameters(params, draw(st.integers(0, 1))), keeps_part=draw(st.booleans()))
    made.reduces_unused = draw(st.sampled_from((False, False, True)))
    return made


def module_of(draw: st.DrawFn, units: list[Unit], depth: int = 0) -> Module:
    """A module, whose units are added to `units`, in the order of the modules."""
    unit = None
    if depth == 0 or draw(st.booleans()):
        groups = [group_of(draw) for _ in range(draw(st.integers(0, 2)))]
        unit = Unit(groups, ("module",), draw(st.sampled_from((None, None, True, False, 2))))
        unit.unshards_in_backward = draw(st.sampled_from((True, True, True, False)))
        units.append(unit)
    num_children = draw(st.integers(1, 3)) if depth == 0 else draw(st.integers(0, 2)) if depth < 3 else 0
    children = [module_of(draw, units, depth + 1) for _ in range(num_children)]
    return Module(unit, children, draw(st.sampled_from((1, 1, 1, 2))) if depth else 1)


def bundles_of(draw: st.DrawFn, units: list[Unit]) -> list[Bundle]:
    """Some units in a row go together."""
    candidates = [unit for unit in units if unit.groups and unit.groups[0].buckets is None]
    candidates = [unit for unit in candidates if type(unit.reshard_after_forward) is not int]
    bundles, size = [], draw(st.integers(2, 3))
    for start in range(0, len(candidates) - size + 1, size) if draw(st.booleans()) else ():
        members = candidates[start : start + size]
        bundle = Bundle([group for unit in members for group in unit.groups], gathers=draw(st.booleans()))
        bundles.append(bundle)
        for group in bundle.groups:
            group.bundle = bundle
        for unit in members if bundle.gathers else ():
            unit.mates = frozenset(members)
    return bundles


def random_model(draw: st.DrawFn) -> tuple[Model, Module, list[Unit]]:
    units: list[Unit] = []
    top = module_of(draw, units)
    for group in units[0].groups:
        if len(group.facts.params) > 1 and draw(st.booleans()):
            group.buckets = Buckets([group.facts.params[:1], group.facts.params[1:]])
    model = Model(units[0], units)
    model.bundles = bundles_of(draw, units)
    for unit in units:
        for name in ("forward_prefetch", "backward_prefetch"):
            if draw(st.sampled_from((False, False, False, True))):
                setattr(unit, name, [draw(st.sampled_from(units))])
    return model, top, units


def groups_of(units: list[Unit]) -> Iterator[Group]:
    for unit in units:
        yield from unit.groups
