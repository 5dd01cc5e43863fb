"""Units: a module that `fully_shard` was called on, or several that it was called on together. Pure.

The events here are those of a unit by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from disttrain.fsdp2.machine import commands as do
from disttrain.fsdp2.machine.group import Bundle, Group, Param, Status


class Unit:
    """Groups that are gathered when a module runs, what the user wants done with them, and the state of the module's
    forwards."""

    def __init__(
        self, groups: Sequence[Group], modules: Sequence[Hashable], reshard_after_forward: bool | int | None
    ) -> None:
        self.groups = groups
        self.modules = modules
        for group in groups:
            group.unit = self
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.reduces = True
        """Backward passes reduce gradients, and do not add them up on each rank."""
        self.is_last_backward = True
        """Of a root: gradients are there when its backward has ended."""
        self.forward_prefetch: Sequence[Unit] | None = None
        self.backward_prefetch: Sequence[Unit] | None = None
        self.is_scheduled = False
        """A schedule decides when to gather, free and reduce."""
        self._forget()

    def _forget(self) -> None:
        self.is_root = False
        self.mates: frozenset[Unit] = frozenset()
        """Units, this one too, whose parameters are gathered with those of this one."""
        self.is_kept_unsharded = False
        """True once the user has gathered the parameters, until their backward or until the user frees them."""
        self.is_shown_on_request = False
        """True where the user has waited for that: modules have the gathered ones as long."""
        self.is_silent = False
        """True if no tensor of the outputs can signal that the backward begins."""
        self.awaits_post_backward = False
        """Its backward has begun, and not ended."""
        self.is_alone = False
        """True if its last forward was called outside the root's: other units may not run, so they are not gathered
        with it."""
        self.num_methods = 0
        """Methods other than forward that are under way; within them, the module's forward is no new one."""
        self.num_running = 0
        """Forwards of the modules that are under way: a module may call itself."""
        self.to_run: set[Hashable] = set()
        """Of several modules those that have not run since the first of them did."""

    @property
    def frees_after_forward(self) -> bool:
        """True where what was gathered for forward is gathered again for backward."""
        # The root's backward comes right after its forward: freeing in between would only gather twice.
        return not self.is_root if self.reshard_after_forward is None else self.reshard_after_forward is not False

    def __getstate__(self) -> dict[str, object]:
        """The state of a deep copy: a module that has not run yet."""
        copied = Unit.__new__(Unit)
        copied.__dict__.update(self.__dict__)
        copied._forget()
        return {**copied.__dict__, "is_scheduled": False}

    def begins_first(self) -> bool:
        """True for the first of the modules to run: with its inputs' gradients, the backward of all is over."""
        is_first = not self.to_run
        if is_first:
            self.to_run.update(self.modules)
        return is_first or len(self.modules) == 1

    def forget_forward(self) -> None:
        """None of the modules has run."""
        self.to_run.clear()
        self.num_running = 0

    def forget_run(self) -> None:
        """Neither a forward nor a backward is under way, and nothing is gathered."""
        self.forget_forward()
        self.release_to_machine()
        self.is_silent = self.awaits_post_backward = self.is_alone = False
        self.num_methods = 0

    def release_to_machine(self) -> None:
        """Lets the machine free again what the user has gathered."""
        self.is_kept_unsharded = self.is_shown_on_request = False


def joined(groups: Sequence[Group], units: Sequence[Unit], *, gathers: bool) -> Bundle:
    """Bundles these groups of the units: they go over the wire as one message; without `gathers`, reductions alone."""
    bundle = Bundle(groups, gathers=gathers)
    for group in groups:
        group.bundle = bundle
    mates = frozenset(units)
    for unit in mates if gathers and len(mates) > 1 else ():
        unit.mates = mates
    return bundle


def gather(group: Group, *, alone: bool = False) -> do.Commands:
    """`group`, which is sharded, will be needed; so will the rest of its bundle, unless `alone`."""
    is_one = alone or group.bundle is None or group.status is Status.PART_KEPT
    groups = (group,) if is_one or group.bundle is None else group.bundle.to_gather(group)
    yield do.Gather(group, groups)
    for each in groups:
        each.gathered_with, each.status = groups, Status.GATHERING


def wait(group: Group) -> do.Commands:
    """`group`, which is on its way, is needed now."""
    yield do.Wait(group)
    for each in group.gathered_with:
        each.gathered_with, each.status = (), Status.UNSHARDED


def free(group: Group, keep_on: int | None = None) -> do.Commands:
    """`group` is needed no longer. A gather that nobody has waited for is waited for first."""
    if group.status is Status.SHARDED:
        return
    if group.status is Status.PART_KEPT:
        yield do.DropPart(group)
        group.status = Status.SHARDED
        return
    if group.status is Status.GATHERING:
        yield from wait(group)
    keep_on = keep_on if group.keeps_part else None
    yield do.Free(group, keep_on)
    group.status = Status.SHARDED if keep_on is None else Status.PART_KEPT
    if group.bundle is not None:
        group.bundle.has_freed(group)


def unshard(unit: Unit, *, alone: bool = False) -> do.Commands:
    """The unit will be needed; what goes with its groups, too, unless `alone`."""
    for group in unit.groups:
        if group.status is Status.SHARDED or group.status is Status.PART_KEPT:
            yield from gather(group, alone=alone)


def wait_for_unshard(unit: Unit) -> do.Commands:
    """The modules compute now, with what has been gathered."""
    for group in unit.groups:
        if group.status is Status.GATHERING:
            yield from wait(group)
    yield from show(unit)


def settle(unit: Unit) -> do.Commands:
    """Shards may be written to from now on, which a gather that nobody has waited for would still read."""
    for group in unit.groups:
        if group.status is Status.GATHERING:
            yield from wait(group)


def show(unit: Unit) -> do.Commands:
    """The modules compute with what is gathered."""
    for group in unit.groups:
        if group.status is Status.UNSHARDED:
            yield do.Show(group)


def show_shards(unit: Unit) -> do.Commands:
    """The modules show the shards, unless the user has asked for gathered parameters."""
    if not unit.is_shown_on_request:
        yield from hide(unit)


def hide(unit: Unit) -> do.Commands:
    """The modules show the shards; the gathered parameters keep their memory."""
    for group in unit.groups:
        if group.status is Status.UNSHARDED:
            yield do.Hide(group)


def reshard(unit: Unit, keep_on: int | None = None) -> do.Commands:
    """The unit is needed no longer."""
    for group in unit.groups:
        if group.status is not Status.SHARDED:
            yield from free(group, keep_on)


def gather_anew(group: Group) -> do.Commands:
    """Modules have other shards now than those that have been gathered."""
    yield from free(group)
    yield from gather(group)
    yield from wait(group)
    yield do.Show(group)


def keep_unsharded(unit: Unit, *, is_running: bool) -> do.Commands:
    """The user wants the unit unsharded; `is_running`: while the model computes."""
    if not (unit.is_kept_unsharded or is_running):
        # Parameters gathered for an earlier forward may be out of date.
        yield from reshard(unit)
    yield from unshard(unit, alone=not is_running)
    unit.is_kept_unsharded = True


def release(unit: Unit) -> do.Commands:
    """The user does not need the unit unsharded any more."""
    yield from reshard(unit)
    unit.release_to_machine()


def load_begins(unit: Unit) -> do.Commands:
    """Values are to be loaded into the shards."""
    if unit.is_kept_unsharded:
        yield from reshard(unit)
    yield from hide(unit)


def forget_grads(unit: Unit) -> do.Commands:
    """Drops what backward passes have left and not reduced."""
    for group in unit.groups:
        group.reduced.clear()
        group.has_taken_part = False
        yield do.DropGrads(group)


def gradient_is_ready(unit: Unit, group: Group, number: int, param: Param) -> do.Commands:
    """A parameter of this bucket of a root's has its gradient."""
    buckets = group.buckets
    if buckets is None or not buckets.is_filled_by(number, param):
        return
    if unit.reduces and not unit.is_scheduled and not group.reduces_unused:
        group.reduced.update(buckets.params[number])
        yield from reduce([(group, buckets.params[number])])


def backward_leaves(unit: Unit, *, at_end: bool = False) -> do.Commands:
    """The unit's backward is over, or `at_end` that of the whole model; harmless the second time."""
    unit.awaits_post_backward = False
    for group in reversed(unit.groups):
        if unit.reshard_after_backward and group.status is not Status.SHARDED:
            yield from free(group)
        if unit.reduces:
            yield from reduce_what_is_left(group, at_end=at_end)
        else:
            yield do.KeepGrads(group)


def reduce_what_is_left(group: Group, *, at_end: bool) -> do.Commands:
    """Reduce the gradients of this backward pass, or what is there of them, that have not been."""
    reduced, params = group.reduced, group.facts.params
    if reduced:
        params = [param for param in params if param not in reduced or param.has_grad]
        group.reduced = set()
    is_owed = group.reduces_over_replicas and group.facts.has_unreduced
    takes_part = group.reduces_unused and group.is_trained and not (at_end and group.has_taken_part)
    group.has_taken_part = not at_end
    is_due = is_owed or takes_part or group.facts.has_grads
    if group.bundle is not None:
        yield from reduce_in_bundle(group.bundle, group, params if is_due else ())
    elif is_due:
        yield from reduce([(group, params)], named=group)


def reduce(
    parts: Sequence[tuple[Group, Sequence[Param]]], scale: float | None = None, named: Group | None = None
) -> do.Commands:
    """All of it is there. A schedule, which gives `scale`, waits for no reduction under way."""
    if scale is None:
        # First, since their results, which are still to be reduced over the replicas, take part.
        yield do.Finish(but_last_sum=True, named=named)
    yield do.Reduce(parts, scale, named)


def reduce_in_bundle(bundle: Bundle, group: Group, params: Sequence[Param], scale: float | None = None) -> do.Commands:
    """The backward of `group` is over, and these of its parameters are to be reduced, if any."""
    if params or group not in bundle.owed:
        bundle.owed[group] = params
    bundle.scale = scale
    if bundle.is_complete:
        yield from flush(bundle, group)


def flush(bundle: Bundle, named: Group | None = None) -> do.Commands:
    """The backward pass has ended: whatever is still to come is not waited for."""
    for parts in bundle.take_owed():
        yield from reduce(parts, bundle.scale, named)
