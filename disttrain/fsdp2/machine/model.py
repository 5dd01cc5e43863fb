"""A root and the units below it: where iterations begin and end. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import chain

from disttrain.fsdp2.machine import commands as do
from disttrain.fsdp2.machine.group import Bundle, Group, Status
from disttrain.fsdp2.machine.order import ExecutionOrder
from disttrain.fsdp2.machine.unit import (
    Unit,
    backward_leaves,
    flush,
    forget_grads,
    free,
    reduce_what_is_left,
    reshard,
    settle,
    show,
    show_shards,
    unshard,
    wait_for_unshard,
)


class Backward(Enum):
    """The state of a backward pass."""

    NONE = "none"
    RUNNING = "one has reached the model, and not ended"
    FAILED = "one has ended with an exception"


class Model:
    """The state that the units of one model share during an iteration."""

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        """`units` are the root and those below, in the order of their modules."""
        self.root = root
        self.units = units
        self.bundles: Sequence[Bundle] = ()
        self.order: ExecutionOrder[Unit] = ExecutionOrder()
        self.is_in_forward = False
        self.backward = Backward.NONE
        for unit in units:
            unit.is_root = unit is root

    def expect_all(self) -> None:
        """From now on no unit has run yet: bundles are gathered as a whole."""
        for bundle in self.bundles:
            bundle.begin()

    def forget_run(self) -> None:
        """No iteration is under way. The order that was learnt before stays."""
        self.is_in_forward, self.backward = False, Backward.NONE
        self.order.forget_run()
        for bundle in self.bundles:
            bundle.forget_run()

    def iteration_begins(self, written: Collection[Group]) -> do.Commands:
        """The root's forward begins. Parameters that were gathered before may have been overwritten, and are gathered
        again. Those that the user keeps unsharded are gathered again only if their shards have been `written` to."""
        self.is_in_forward = True
        self.order.begin()
        for unit in self.units:
            unit.forget_forward()
            yield from free_old(unit, written)
        self.expect_all()

    def forward_begins(self, unit: Unit, *, is_recomputation: bool = False) -> do.Commands:
        """A forward of one of the unit's modules begins, or is done again for its backward."""
        yield from unshard(unit, alone=unit.is_alone)
        yield from wait_for_unshard(unit)
        unit.num_running += 1
        # Recomputation does not follow the learnt order.
        if self.is_in_forward and not is_recomputation:
            following = self.order.visit(unit, unit.mates)
            for each in _ahead(unit.forward_prefetch, following):
                yield from unshard(each)

    def leaves_forward(self, unit: Unit) -> bool:
        """A forward has computed its outputs. True where it is the root's, with which the iteration's ends."""
        ends_iteration = unit.is_root and not unit.num_methods
        if ends_iteration:
            self.is_in_forward = False
        return ends_iteration

    def forward_ends(
        self, unit: Unit, *, has_failed: bool = False, grad_will_come: bool = True, is_begun: bool = False
    ) -> do.Commands:
        """A forward of one of the unit's modules ends. `is_begun`: it will compute later on, as a generator does."""
        ends_iteration = unit.is_root and not unit.num_methods
        unit.num_running = max(unit.num_running - 1, 0)
        # If the outputs contain no tensor, nothing will signal that the backward begins.
        is_needed = unit.is_kept_unsharded or unit.awaits_post_backward or unit.is_silent or unit.num_running > 0
        is_needed = is_needed or (bool(unit.to_run) and not has_failed) or is_begun
        if not is_needed and not grad_will_come:
            yield from reshard(unit)
        elif not is_needed and unit.frees_after_forward:
            yield from reshard(unit, _ranks_after_forward(unit))
        if ends_iteration and not grad_will_come:
            yield do.FinishUpload()
            for each in self.units:
                if not (each.is_kept_unsharded or each.awaits_post_backward):
                    yield from reshard(each)
        elif ends_iteration:
            for each in self.units:
                if not each.is_kept_unsharded:
                    yield from settle(each)
        # Parameters kept for the backward stay in the modules until the root's forward ends, since that may use them.
        if not self.is_computing(unit):
            for each in self.units if unit.is_root else (unit,):
                yield from show_shards(each)

    def is_computing(self, unit: Unit) -> bool:
        """True while the model's forward or backward is under way, or one of the unit's."""
        return self.is_in_forward or self.backward is Backward.RUNNING or unit.num_running > 0

    def backward_begins(self) -> do.Commands:
        """The first gradient of a backward pass reaches the model."""
        if self.backward is Backward.FAILED:
            yield from self.abandon()
        # This backward has to reduce what earlier ones left, also for parameters that it does not reach.
        yield do.Finish(if_partial=True)
        for group in self.root.groups:
            group.reduced.clear()
            if group.buckets is not None:
                group.buckets.begin()
        self.expect_all()
        for unit in self.units:
            # Parameters that have stayed unsharded since the root's forward stay in the modules until the backward
            # ends: the recomputation of a checkpoint may need them.
            yield from show(unit)
        self.backward = Backward.RUNNING

    def gradient_reaches(self, unit: Unit) -> do.Commands:
        """A gradient reaches the unit's outputs: its backward begins, once that has been gathered which it needs."""
        unit.awaits_post_backward = True
        if unit.unshards_in_backward:
            yield from unshard(unit, alone=unit.is_alone)

    def backward_enters(self, unit: Unit) -> do.Commands:
        """It begins."""
        if unit.unshards_in_backward:
            yield from wait_for_unshard(unit)
        following = self.order.backward_from(unit, unit.mates)
        for each in _ahead(unit.backward_prefetch, following):
            if each.unshards_in_backward:
                yield from unshard(each)

    def backward_ends(self) -> do.Commands:
        """The backward pass has ended: units whose end no gradient has signalled are reduced and freed."""
        for unit in reversed(self.units):
            yield from backward_leaves(unit, at_end=True)
            unit.is_kept_unsharded = not unit.reshard_after_backward
            unit.is_shown_on_request = False
            yield from settle(unit)
        yield from self.reduce_rest()
        if self.root.is_last_backward:
            yield do.Finish()
            yield do.Settle(self.groups)
        self.backward = Backward.NONE
        yield from self.show_shards()

    @property
    def groups(self) -> list[Group]:
        """Those of all units."""
        return [*chain.from_iterable(unit.groups for unit in self.units)]

    def backward_fails(self) -> do.Commands:
        """The backward pass has ended with an exception."""
        self.backward = Backward.FAILED
        yield from self.show_shards()

    def reduce_what_is_left(self) -> do.Commands:
        """Reduce what gradients there are, of all units."""
        for unit in reversed(self.units):
            for group in reversed(unit.groups):
                yield from reduce_what_is_left(group, at_end=True)
        yield from self.reduce_rest()

    def reduce_rest(self) -> do.Commands:
        """If units are reduced as one message, reduce those that wait for others that did not come."""
        for bundle in reversed(self.bundles):
            yield from flush(bundle)

    def show_shards(self) -> do.Commands:
        """Neither a forward nor a backward is under way."""
        for unit in self.units:
            yield from show_shards(unit)

    def reset(self) -> do.Commands:
        """Forget an iteration that has ended with an exception, whichever way."""
        self.is_in_forward = False
        yield from self.abandon()
        for unit in self.units:
            yield from reshard(unit)
            unit.release_to_machine()

    def abandon(self) -> do.Commands:
        """A backward pass has ended with an exception: its gradients are not all there, and are dropped."""
        yield do.DropReductions()
        for bundle in self.bundles:
            bundle.owed = {}
        for unit in self.units:
            unit.awaits_post_backward = False
            yield from forget_grads(unit)
        self.backward = Backward.NONE


def free_old(unit: Unit, written: Collection[Group]) -> do.Commands:
    """Free parameters that may have been overwritten since they were gathered: all, but of those that the user keeps
    only the `written` ones."""
    for group in unit.groups:
        if group.status is not Status.SHARDED and (not unit.is_kept_unsharded or group in written):
            yield from free(group)


def _ahead(chosen: Sequence[Unit] | None, learnt: Unit | None) -> Sequence[Unit]:
    """Returns the units to gather ahead: those that the user has chosen, else the one that came next in the last
    iteration."""
    return chosen if chosen is not None else () if learnt is None else (learnt,)


def _ranks_after_forward(unit: Unit) -> int | None:
    return None if isinstance(unit.reshard_after_forward, bool | None) else unit.reshard_after_forward
