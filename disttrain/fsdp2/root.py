"""State that the modules of one model share: where its iterations begin and end."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import when_backward_ends
from disttrain.fsdp2.faults.lone_errors import tell_of
from disttrain.fsdp2.faults.stale_graphs import written_to
from disttrain.fsdp2.machine.commands import Commands
from disttrain.fsdp2.machine.model import Backward, Model
from disttrain.fsdp2.modules.statistics import RunningStatistics
from disttrain.fsdp2.modules.structure import Structure
from disttrain.fsdp2.runner import run
from disttrain.fsdp2.transfers.comm import Comm
from disttrain.fsdp2.transfers.measuring import costs_of
from disttrain.fsdp2.transfers.planning import PlannedState, TransferPlan, carry_out, plan_transfers
from disttrain.mesh import DeviceMesh


class RootedState(PlannedState, Protocol):
    """Modules that share a root with others."""

    context: RootContext | None
    shared_comm: Comm | None
    post_optim_event: torch.Event | None

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    def forget_forward(self) -> None: ...

    def become_root(self) -> RootContext: ...


class RootContext:
    """The machine of one model, with the streams, the plan of transfers and the checks that its modules share."""

    def __init__(self, root: RootedState, states: Sequence[RootedState], comm: Comm) -> None:
        self.root = root
        self.states = states
        self.comm = comm
        self.model = Model(root.unit, [state.unit for state in states])
        self.structure = Structure(root.modules)
        meshes = (group.sharding.mesh for group in chain.from_iterable(state.groups for state in (root, *states)))
        # Experts are on fewer ranks than what has the running statistics.
        self.statistics = RunningStatistics(root.modules, max(meshes, key=DeviceMesh.size, default=None))
        self._backward: weakref.ref[partial[None]] | None = None
        for state in states:
            state.context = self
        self.use(comm)
        self.plan = TransferPlan()
        self.is_planned = False
        # Ranks come here alike: at the model's first forward, or the first after it has been changed.
        self.make_plan()

    def make_plan(self) -> None:
        """Plan how values go over the wire, where that has not been done since something changed. Collective once."""
        if self.is_planned:
            return
        in_buckets = {group for group in self.root.groups if group.state.buckets is not None}
        self.plan = plan_transfers(self.states, partial(costs_of, device=self.root.device), in_buckets)
        self.model.bundles = carry_out(self.plan)
        self.is_planned = True

    def use(self, comm: Comm) -> None:
        """Communicate on these streams."""
        if comm is not self.comm:
            self.comm.finish_reductions()
        self.comm = comm
        for group in chain.from_iterable(state.groups for state in self.states):
            group.comm = comm

    def run(self, commands: Commands) -> None:
        """Do what the machine asks for."""
        run(commands, self.comm)

    def begin_forward(self) -> None:
        """The root's forward begins."""
        if self.model.backward is not Backward.NONE:
            self._abandon()
        self.make_plan()
        self.comm.ready, self.root.post_optim_event = self.root.post_optim_event, None
        for state in self.states:
            state.forget_forward()
        kept_unsharded = [state for state in self.states if state.unit.is_kept_unsharded]
        written = written_to([*chain.from_iterable(state.groups for state in kept_unsharded)])
        self.run(self.model.iteration_begins(written))

    def begin_backward(self) -> None:
        """A gradient of a backward pass reaches the model, maybe the first one."""
        if torch.is_grad_enabled():
            raise ShardingError(
                "backward",
                "create_graph=True would need unsharded parameters again after they have been freed.",
                "Leave the module that needs gradients of gradients out of fully_shard.",
            )
        if self.model.backward is Backward.RUNNING:
            return
        self.run(self.model.backward_begins())
        # Only the engine holds this object. It is freed if the pass fails, once the exception has reached the caller.
        end = partial(RootContext.end_backward, self)
        this = weakref.ref(self)

        def fail(_: object) -> None:
            if (context := this()) is not None:
                context.fail_backward()

        self._backward = weakref.ref(end, fail)
        when_backward_ends(end)

    def end_backward(self) -> None:
        """The backward pass has ended."""
        self.run(self.model.backward_ends())
        self._backward = None

    def fail_backward(self) -> None:
        """It has ended with an exception on this rank; others may wait for what would have come."""
        self.run(self.model.backward_fails())
        error = ShardingError(
            "backward",
            "its backward pass has ended with an exception.",
            "See what that rank has raised.",
        )
        tell_of("backward", error, [group for state in self.states for group in state.groups])

    def forget_run(self) -> None:
        """No iteration is under way; waits for nothing."""
        self._backward = None
        self.model.forget_run()
        self.comm.forget_run()

    def reset(self) -> None:
        """Forget an iteration that has ended with an exception, whichever way."""
        self._backward = None
        self.run(self.model.reset())

    def _abandon(self) -> None:
        self._backward = None
        self.run(self.model.abandon())


def share_comm(states: Sequence[RootedState]) -> None:
    """Let these roots communicate on the same streams."""
    for state in states:
        comm = state.shared_comm = states[0].shared_comm = states[0].shared_comm or Comm(states[0].device)
        if state.context is not None and state.context.root is state:
            state.context.use(comm)
