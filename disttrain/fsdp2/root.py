"""What the modules of one model share: where its iterations begin and end."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import when_backward_ends
from disttrain.fsdp2.comm import Comm
from disttrain.fsdp2.lone_errors import tell_of
from disttrain.fsdp2.order import ExecutionOrder
from disttrain.fsdp2.stale_graphs import free_old
from disttrain.fsdp2.structure import Structure
from disttrain.fsdp2.transfers.measuring import costs_of
from disttrain.fsdp2.transfers.planning import TransferPlan, carry_out, plan_transfers

if TYPE_CHECKING:
    from disttrain.fsdp2.state import ShardState
    from disttrain.fsdp2.transfers.together import Together


class _BackwardEnd:
    """What the autograd engine calls when a backward pass ends. It alone holds it: it is gone when the pass fails."""

    def __init__(self, context: RootContext) -> None:
        self._context = context

    def __call__(self) -> None:
        self._context.end_backward()


class _Failure:
    """Called when a backward pass is gone that has not ended: an exception has reached whoever called it."""

    def __init__(self, context: RootContext) -> None:
        self._context = weakref.ref(context)

    def __call__(self, _: object) -> None:
        context = self._context()
        if context is not None:
            context.show_shards()
            context.tell_of_failure()


class RootContext:
    """What the modules of one model share during an iteration."""

    def __init__(self, root: ShardState, states: list[ShardState], comm: Comm) -> None:
        self.root = root
        self.states = states
        self.comm = comm
        self.order: ExecutionOrder[ShardState] = ExecutionOrder()
        self.structure = Structure(root.modules)
        self.is_in_forward = False
        self._backward: weakref.ref[_BackwardEnd] | None = None
        for state in states:
            state.context = self
        self.use(comm)
        self.plan = TransferPlan()
        self._together: list[Together] = []
        self.is_planned = False
        # Ranks come here alike: at the model's first forward, or the first after it has been changed.
        self.make_plan()

    def make_plan(self) -> None:
        """Plan how values go over the wire, where that has not been done since something changed. Collective once."""
        if self.is_planned:
            return
        early = {group for group in self.root.groups if group.reduces_early}
        self.plan = plan_transfers(self.states, partial(costs_of, device=self.root.device), early)
        self._together = carry_out(self.plan)
        self.is_planned = True

    def expect_all(self) -> None:
        """From now on all modules are to come: what goes together is gathered together."""
        for together in self._together:
            together.begin()

    def use(self, comm: Comm) -> None:
        """Communicate on these streams."""
        if comm is not self.comm:
            self.comm.finish_reductions()
        self.comm = comm
        for group in chain.from_iterable(state.groups for state in self.states):
            group.comm = comm

    @property
    def is_in_backward(self) -> bool:
        """True while a backward pass that has reached the model is under way."""
        return self._backward is not None and self._backward() is not None

    def begin_forward(self) -> None:
        """The root's forward begins. What was gathered before, and maybe overwritten since, is gathered anew."""
        if self._backward is not None:
            self._abandon_backward()
        self.make_plan()
        self.is_in_forward = True
        self.comm.ready, self.root.post_optim_event = self.root.post_optim_event, None
        self.order.begin()
        for state in self.states:
            state.forget_forward()
            free_old(state.groups, is_kept=state.is_kept_unsharded)
        self.expect_all()

    def begin_backward(self) -> None:
        """The first gradient of a backward pass reaches the model."""
        if torch.is_grad_enabled():
            raise ShardingError(
                "backward",
                "create_graph=True would need whole parameters again after they have been freed.",
                "Leave the module that needs gradients of gradients out of fully_shard.",
            )
        if self.is_in_backward:
            return
        if self._backward is not None:
            self._abandon_backward()
        if any(not one.is_complete for one in self.comm.reducing):
            # What these leave is owed by this backward, also of parameters that it does not reach.
            self.comm.finish_reductions()
        for group in self.root.groups:
            group.begin_backward()
        self.expect_all()
        for state in self.states:
            # What has stayed whole since the root's forward is in modules until the backward ends, as it was there:
            # what a checkpoint computes again may need it.
            state.show()
        end = _BackwardEnd(self)
        self._backward = weakref.ref(end, _Failure(self))
        when_backward_ends(end)

    def end_backward(self) -> None:
        """Reduce what no hook has reduced, wait for the last reduction, leave every parameter sharded."""
        for state in reversed(self.states):
            state.post_backward(at_end=True)
            state.is_kept_unsharded = not state.reshard_after_backward
            state.is_shown_on_request = False
        self.reduce_rest()
        if self.root.is_last_backward:
            self.comm.finish_reductions()
            self.comm.finish_offload()
            self.comm.several_grads.call_hooks()
            self.comm.release_gathered()
            for group in chain.from_iterable(state.groups for state in self.states):
                group.rounded = None
        self._backward = None
        self.show_shards()

    def reduce_rest(self) -> None:
        """Reduce what waits for others that have not come, where modules are reduced as one message. Collective."""
        for together in reversed(self._together):
            together.flush()

    def show_shards(self) -> None:
        """Neither a forward nor a backward is under way: modules have shards, but where a user has asked for wholes."""
        for state in self.states:
            state.show_shards()

    def tell_of_failure(self) -> None:
        """A backward pass has failed on this rank; others may wait for what would have come."""
        error = ShardingError(
            "backward",
            "its backward pass has ended with an exception.",
            "See what that rank has raised.",
        )
        tell_of("backward", error, [group for state in self.states for group in state.groups])

    def reset(self) -> None:
        """Forget an iteration that has ended with an exception, whichever way."""
        self.is_in_forward = False
        self._abandon_backward()
        for state in self.states:
            state.reshard()
            state.is_kept_unsharded = state.is_shown_on_request = False

    def _abandon_backward(self) -> None:
        """A backward pass has ended with an exception: its gradients are not all there, and are dropped."""
        self.comm.drop_reductions()
        for together in self._together:
            together.forget()
        for state in self.states:
            state.abandon_backward()
        self._backward = None


def share_comm(states: list[ShardState]) -> None:
    """Let these roots communicate on the same streams."""
    for state in states:
        comm = state.shared_comm = states[0].shared_comm = states[0].shared_comm or Comm(states[0].device)
        if state.context is not None and state.context.root is state:
            state.context.use(comm)
