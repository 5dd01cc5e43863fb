"""Units whose gathers, frees and reductions a schedule decides, as that of a pipeline does. Pure.

    stage.set_is_scheduled(True)       # once; from then on a forward or backward gathers, frees and reduces nothing
    stage.unshard_all()                # all gathers start; each forward and backward waits for its own module's
    ...                                # forwards and backwards of any microbatches; backwards may be split in two
    stage.reshard_all()                # gradients of gathered parameters stay, and are added to after the next unshard
    stage.reduce_grads(1 / 8)          # once, after the last gradient has come
    stage.finish_grads()               # in the end: the shards have their gradients

Several microbatches are in flight at once, so no module can tell from its own calls who needs its parameters next, and
which of its gradients is the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.fsdp2.machine import commands as do
from disttrain.fsdp2.machine.model import Model
from disttrain.fsdp2.machine.unit import Unit, reduce, reduce_in_bundle, release, reshard, unshard, wait_for_unshard


def set_scheduled(unit: Unit, *, is_scheduled: bool) -> do.Commands:
    """From now on a schedule decides about the unit, or its forwards and backwards do."""
    yield from release(unit)
    unit.forget_forward()
    unit.is_scheduled = is_scheduled


def unshard_all(units: Sequence[Unit]) -> do.Commands:
    """All of these are needed, in the order of their modules."""
    for unit in units:
        yield from unshard(unit)
        if unit.is_silent:
            # Nothing tells when its backward begins.
            yield from wait_for_unshard(unit)


def reshard_all(units: Sequence[Unit]) -> do.Commands:
    """None of these is needed."""
    for unit in units:
        yield from reshard(unit)


def reduce_all(model: Model, units: Sequence[Unit], scale: float) -> do.Commands:
    """The last gradients have come, whichever there are on this rank: all trained parameters receive one."""
    for unit in reversed(units):
        for group in reversed(unit.groups) if unit.reduces else ():
            is_due = group.is_trained or group.facts.has_unreduced
            if group.bundle is not None:
                yield from reduce_in_bundle(group.bundle, group, group.facts.params if is_due else (), scale)
            elif is_due:
                yield from reduce([(group, group.facts.params)], scale, group)
    yield from model.reduce_rest()


def finish_all() -> do.Commands:
    """The shards are to have their gradients."""
    yield do.Finish()
    yield do.Settle(())
    yield do.FinishUpload()
