"""Modules whose gathers, frees and reductions a schedule decides: what a root's methods are called for."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain.fsdp2.machine.schedule import finish_all, reduce_all, reshard_all, unshard_all
from disttrain.fsdp2.machine.schedule import set_scheduled as set_unit_scheduled
from disttrain.fsdp2.root import RootContext
from disttrain.fsdp2.state import ShardState


def set_scheduled(states: Sequence[ShardState], *, is_scheduled: bool) -> None:
    """From now on these modules, a root first, do nothing by themselves; or all around their forwards and backwards."""
    if is_scheduled and states[0].context is None:
        states[0].become_root()
    for state in states:
        if state.unit.is_scheduled is is_scheduled:
            continue
        state.forget_forward()
        state.run(set_unit_scheduled(state.unit, is_scheduled=is_scheduled))
        state.scheduled = state.with_those_below() if is_scheduled else []
        for group in state.groups:
            group.sum_grads_as_they_come(is_scheduled)


def unshard_scheduled(states: Sequence[ShardState]) -> None:
    """Start all gathers, in the order of the modules."""
    context = _context(states)
    if not context.structure.holds():
        context.root.become_root()
        context = _context(states)
    context.make_plan()
    context.model.expect_all()
    context.comm.ready, states[0].post_optim_event = states[0].post_optim_event, None
    context.run(unshard_all([state.unit for state in states]))
    context.comm.ready = None


def reshard_scheduled(states: Sequence[ShardState]) -> None:
    """Free what was gathered."""
    _context(states).run(reshard_all([state.unit for state in states]))


def reduce_scheduled(states: Sequence[ShardState], scale: float) -> None:
    """Start all reductions, last module first, whichever gradients there are on this rank."""
    context = _context(states)
    context.run(reduce_all(context.model, [state.unit for state in states], scale))


def finish_scheduled(states: Sequence[ShardState]) -> None:
    """Hand the reduced gradients out, those of other roots with the same streams, too."""
    _context(states).run(finish_all())


def _context(states: Sequence[ShardState]) -> RootContext:
    context = states[0].context
    assert context is not None, "it has one since set_is_scheduled"
    return context
