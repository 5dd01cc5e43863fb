"""Whatever models compute in whatever order: what is used has been gathered, what is gathered is freed, and each
gradient is reduced once. No tensor, no process: the machine is fed events, and a list minds its commands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.fsdp2.machine.commands import Commands, Gather, Reduce
from disttrain.fsdp2.machine.group import Buckets, Bundle, Group, Status
from disttrain.fsdp2.machine.model import Backward, Model, free_old
from disttrain.fsdp2.machine.schedule import finish_all, reduce_all, reshard_all, set_scheduled, unshard_all
from disttrain.fsdp2.machine.unit import (
    Unit,
    backward_leaves,
    gradient_is_ready,
    keep_unsharded,
    release,
    wait_for_unshard,
)
from tests.state_machines.fully_shard import CommandFailed, Module, Parameter, Parameters, Rank, groups_of, random_model


class Step:
    """What a model does to the machine, as torch's hooks would tell."""

    def __init__(self, model: Model, rank: Rank, draw: st.DrawFn) -> None:
        self.model, self.rank, self.draw = model, rank, draw
        self.num_grads = 0

    def forward(self, module: Module, *, grad: bool) -> None:
        unit, run = module.unit, self.rank.run
        for _ in range(module.times):
            if unit is None:
                for child in module.children:
                    self.forward(child, grad=grad)
                continue
            try:
                self.begin(unit)
                run(self.model.forward_begins(unit))
                assert_used(unit)
                for child in module.children:
                    self.forward(child, grad=grad)
                    assert_used(unit)
            except CommandFailed:
                self.model.leaves_forward(unit)
                run(self.model.forward_ends(unit, has_failed=True, grad_will_come=False))
                raise
            self.model.leaves_forward(unit)
            run(self.model.forward_ends(unit, grad_will_come=grad))

    def begin(self, unit: Unit) -> None:
        unit.is_alone = not (unit.is_root or self.model.is_in_forward)
        if unit.is_root:
            if self.model.backward is not Backward.NONE:
                self.rank.run(self.model.abandon())
            self.rank.run(self.model.iteration_begins(()))
        elif not self.model.is_in_forward:
            self.rank.run(free_old(unit, ()))

    def backward(self, module: Module, *, is_first: bool = True) -> None:
        if is_first:
            self.rank.run(self.model.backward_begins())
        unit, run = module.unit, self.rank.run
        for _ in range(module.times):
            if unit is None:
                for child in reversed(module.children):
                    self.backward(child, is_first=False)
                continue
            run(self.model.gradient_reaches(unit))
            run(self.model.backward_enters(unit))
            assert_used(unit, only_if=unit.unshards_in_backward)
            for child in reversed(module.children):
                self.backward(child, is_first=False)
            self.differentiate(unit)
            for _ in range(self.draw(st.sampled_from((0, 1, 1, 1, 2)))):
                run(backward_leaves(unit))
        if is_first:
            run(self.model.backward_ends())

    def differentiate(self, unit: Unit) -> None:
        for group in unit.groups:
            if unit.unshards_in_backward:
                assert group.facts.memory == "unsharded"
            for param in group.facts.params:
                for _ in range(self.draw(st.sampled_from((0, 1, 1, 1, 2))) if param.is_trained else 0):
                    param.num_due += 1
                    self.num_grads += 1
                    for number, bucket in enumerate(group.buckets.params if group.buckets is not None else ()):
                        if param in bucket:
                            self.rank.run(gradient_is_ready(unit, group, number, param))


def assert_used(unit: Unit, *, only_if: bool = True) -> None:
    for group in unit.groups if only_if else ():
        assert group.status is Status.UNSHARDED
        assert group.facts.memory == "unsharded"
        assert group.facts.is_shown


def assert_sharded(units: list[Unit]) -> None:
    for group in groups_of(units):
        assert group.status is Status.SHARDED
        assert group.facts.memory == "freed"
        assert not group.facts.is_shown


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_step_gathers_what_it_uses_and_reduces_each_gradient_once(data: st.DataObject) -> None:
    model, top, units = random_model(data.draw)
    rank = Rank()
    step = Step(model, rank, data.draw)
    for _ in range(data.draw(st.integers(1, 3))):
        for unit in units:
            unit.reduces = data.draw(st.sampled_from((True, True, True, False)))
        step.forward(top, grad=True)
        step.backward(top)
        assert_sharded(units)
        due = {unit: sum(param.num_due for group in unit.groups for param in group.facts.params) for unit in units}
        assert rank.num_reduced + sum(due.values()) == step.num_grads
        assert not any(num_due for unit, num_due in due.items() if unit.reduces)
        assert rank.num_under_way == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_without_gradients_nothing_stays(data: st.DataObject) -> None:
    model, top, units = random_model(data.draw)
    step = Step(model, Rank(), data.draw)
    if data.draw(st.booleans()):
        step.forward(top, grad=True)
    step.forward(top, grad=False)
    assert_sharded(units)
    assert step.rank.num_reduced == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_the_user_keeps_stays_until_it_is_released_or_its_backward_ends(data: st.DataObject) -> None:
    model, top, units = random_model(data.draw)
    step = Step(model, Rank(), data.draw)
    kept = data.draw(st.sampled_from(units))
    step.rank.run(keep_unsharded(kept, is_running=False))
    step.rank.run(wait_for_unshard(kept))
    kept.is_shown_on_request = True
    step.forward(top, grad=False)
    assert_used(kept)
    if data.draw(st.booleans()):
        step.rank.run(release(kept))
    else:
        step.forward(top, grad=True)
        step.backward(top)
    assert_sharded(units)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_after_a_failure_the_next_step_is_as_any_other(data: st.DataObject) -> None:
    """Whichever command fails, in whichever of a step's events."""
    model, top, units = random_model(data.draw)
    rank = Rank(fails_after=data.draw(st.integers(0, 60)))
    step = Step(model, rank, data.draw)
    try:
        step.forward(top, grad=True)
        step.backward(top)
    except CommandFailed:
        if model.backward is Backward.RUNNING:
            rank.run(model.backward_fails())
        if data.draw(st.booleans()):
            rank.run(model.reset())
            assert_sharded(units)
    rank.fails_after = -1
    for group in groups_of(units):
        for param in group.facts.params:
            param.num_due = 0
    rank.num_reduced = step.num_grads = 0
    step.forward(top, grad=True)
    step.backward(top)
    assert_sharded(units)
    assert rank.num_reduced == step.num_grads


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_schedule_alone_decides(data: st.DataObject) -> None:
    model, _, units = random_model(data.draw)
    rank = Rank()
    for unit in units:
        rank.run(set_scheduled(unit, is_scheduled=True))
    num_grads = 0
    for _ in range(2):
        model.expect_all()
        rank.run(unshard_all(units))
        for unit in data.draw(st.permutations(units)):
            rank.run(wait_for_unshard(unit))
            assert_used(unit)
            for param in (param for group in unit.groups for param in group.facts.params if param.is_trained):
                param.num_due += 1
                num_grads += 1
        rank.run(reshard_all(units))
        assert_sharded(units)
    assert rank.num_reduced == 0
    rank.run(reduce_all(model, units, 0.5))
    rank.run(finish_all())
    assert rank.num_reduced == num_grads


def test_a_command_that_fails_has_not_happened() -> None:
    group = Group(Parameters([Parameter(True)]))
    unit = Unit([group], ("module",), None)
    model = Model(unit, [unit])
    rank = Rank(fails_after=0)
    with pytest.raises(CommandFailed):
        rank.run(model.forward_begins(unit))
    assert group.status is Status.SHARDED
    rank.run(model.forward_begins(unit))
    assert_used(unit)


def gathered_at_once(units: list[Unit], model: Model) -> list[int]:
    """How many groups each gather of a forward brings, where each unit runs twice."""
    counts: list[int] = []
    rank = Rank()

    def run(commands: Commands) -> None:
        for command in commands:
            rank.carry_out(command)
            if isinstance(command, Gather):
                counts.append(len(command.groups))

    run(model.iteration_begins(()))
    for unit in units:
        for _ in range(2):
            run(model.forward_begins(unit))
            run(model.forward_ends(unit))
    return counts


def test_a_bundle_is_gathered_once_and_what_runs_again_by_itself() -> None:
    groups = [Group(Parameters([Parameter(True)])) for _ in range(2)]
    units = [Unit([], ("root",), None), *(Unit([group], ("module",), None) for group in groups)]
    model = Model(units[0], units)
    model.bundles = [Bundle(groups, gathers=True)]
    for group in groups:
        group.bundle = model.bundles[0]
    assert gathered_at_once(units[1:], model) == [2, 1, 1]


def test_no_gather_reads_shards_after_the_forward_or_the_backward() -> None:
    """An optimizer, or a user, may write to them then."""
    groups = [Group(Parameters([Parameter(True)])) for _ in range(3)]
    units = [Unit([group], (number,), None) for number, group in enumerate(groups)]
    model, rank = Model(units[0], units), Rank()
    # Each is prefetched by the one behind it, when it has been freed.
    units[2].forward_prefetch = [units[1]]
    units[1].backward_prefetch = [units[2]]
    units[2].reshard_after_backward = False
    step = Step(model, rank, lambda _: 1)
    last, first = (Module(unit, [], 1) for unit in (units[2], units[1]))
    top = Module(units[0], [first, last], 1)
    step.forward(top, grad=True)
    assert [group.status for group in groups].count(Status.GATHERING) == 0
    step.backward(top)
    assert [group.status for group in groups].count(Status.GATHERING) == 0


def test_a_bucket_is_reduced_when_it_is_filled_and_what_comes_later_at_the_end() -> None:
    params = [Parameter(True), Parameter(True), Parameter(True)]
    group = Group(Parameters(params))
    group.buckets = Buckets([params[:2], params[2:]])
    unit = Unit([group], ("module",), None)
    model, rank, sizes = Model(unit, [unit]), Rank(), []

    def run(commands: Commands) -> None:
        for command in commands:
            rank.carry_out(command)
            if isinstance(command, Reduce):
                sizes.append(len(command.parts[0][1]))

    def come(number: int, param: Parameter) -> None:
        param.num_due += 1
        run(gradient_is_ready(unit, group, number, param))

    run(model.iteration_begins(()))
    run(model.forward_begins(unit))
    model.leaves_forward(unit)
    run(model.forward_ends(unit))
    run(model.backward_begins())
    run(model.gradient_reaches(unit))
    run(model.backward_enters(unit))
    come(0, params[0])
    assert sizes == []
    come(0, params[1])
    assert sizes == [2]
    come(0, params[0])
    assert sizes == [2]
    run(model.backward_ends())
    assert sizes == [2, 2]
    assert rank.num_reduced == 3
    assert not any(param.has_grad for param in params)


def test_a_backward_after_one_that_has_failed_reduces_nothing_of_that() -> None:
    params = [Parameter(True)]
    unit = Unit([Group(Parameters(params))], ("module",), None)
    model, rank = Model(unit, [unit]), Rank()
    rank.run(model.iteration_begins(()))
    for _ in range(2):
        rank.run(model.forward_begins(unit))
        rank.run(model.forward_ends(unit))
    rank.run(model.backward_begins())
    params[0].num_due = 1
    rank.run(model.backward_fails())
    rank.run(model.backward_begins())
    assert params[0].num_due == 0
    rank.run(model.backward_ends())
    assert rank.num_reduced == 0
    assert_sharded([unit])
