"""Turns what happens around a module's forward and backward into events: gather before, free after, reduce gradients,
prefetch the next.

Follows the hooks of PyTorch's FSDP2 (pre-forward, post-forward, a hook on the outputs' gradients for pre-backward, an
autograd function on the inputs for post-backward, a callback at the end of the backward pass).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor
from disttrain.errors import DistError, ShardingError
from disttrain.fsdp2._torch import backward_is_running, is_transformed, out_of_graphs
from disttrain.fsdp2.faults.checks import is_begun, refuse_begun, refuse_transform
from disttrain.fsdp2.faults.lone_errors import tell_of
from disttrain.fsdp2.faults.lost_writes import note_values, refuse_writes, written_since
from disttrain.fsdp2.faults.stale_graphs import refuse_stale, written_to
from disttrain.fsdp2.faults.stale_optimizers import watch_stale_optimizers
from disttrain.fsdp2.grads.asked import answer_for
from disttrain.fsdp2.grads.post_backward import as_plain, watch_inputs
from disttrain.fsdp2.machine.commands import Commands
from disttrain.fsdp2.machine.group import Buckets
from disttrain.fsdp2.machine.model import Backward, free_old
from disttrain.fsdp2.machine.schedule import set_scheduled
from disttrain.fsdp2.machine.unit import (
    Unit,
    backward_leaves,
    gradient_is_ready,
    load_begins,
    wait_for_unshard,
)
from disttrain.fsdp2.modules.mutated_arguments import Forwards
from disttrain.fsdp2.modules.pytrees import cast_floats, for_each_tensor, may_hide_tensors
from disttrain.fsdp2.modules.silent_outputs import watch_gradients
from disttrain.fsdp2.modules.state_dicts import show_shards_in_state_dicts
from disttrain.fsdp2.modules.structure import STATE, check_parameters, name_groups
from disttrain.fsdp2.params.buckets import buckets_of
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.policies import MixedPrecisionPolicy, TransferPolicy
from disttrain.fsdp2.root import RootContext
from disttrain.fsdp2.runner import run
from disttrain.fsdp2.transfers.comm import Comm
from disttrain.process_group.watching.refusals import is_recomputed_enough


class ShardState:
    """The state of one module that `fully_shard` was called on, or of several that it was called on together: what
    torch's hooks tell of them becomes events of `unit`."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[ParamGroup],
        policy: MixedPrecisionPolicy,
        device: torch.device,
        reshard_after_forward: bool | int | None,
        left_alone: set[tuple[nn.Module, str]],
        transfers: TransferPolicy,
    ) -> None:
        self.modules = tuple(modules)
        self.module = modules[0]
        self.groups = groups
        self.unit = Unit([group.state for group in groups], self.modules, reshard_after_forward)
        self.left_alone = left_alone
        """Parameters of the modules that no group has taken."""
        self.context: RootContext | None = None
        self._policy = policy
        self.device = device
        self.post_optim_event: torch.Event | None = None
        self.transfers = transfers
        self.shared_comm: Comm | None = None
        """The one that other roots use as well, where the user wants it so."""
        self.scheduled: list[Unit] = []
        """If a schedule decides: this unit and those below."""
        self._forwards = Forwards()
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, always_call=True)
            module.register_load_state_dict_pre_hook(self._before_load)
            show_shards_in_state_dicts(module, groups)

    def __getstate__(self) -> dict[str, object]:
        """The state of a deep copy: a module that has not run yet."""
        gone = dict.fromkeys(("context", "shared_comm", "post_optim_event"))
        return {**self.__dict__, **gone, "scheduled": []}

    def run(self, commands: Commands) -> None:
        """Do what the machine asks for."""
        run(commands, None if self.context is None else self.context.comm)

    @property
    def is_running(self) -> bool:
        """True while the model computes."""
        model = None if self.context is None else self.context.model
        return model is not None and (model.is_in_forward or model.backward is Backward.RUNNING)

    def wait_for_unshard(self) -> None:
        """Have the module compute with the gathered parameters."""
        self.run(wait_for_unshard(self.unit))

    def reset_iteration(self) -> None:
        """Forget an iteration that has ended with an exception."""
        if self.context is None or not self.unit.is_root:
            raise ShardingError(
                "reset_iter_state",
                "this module is no root that has run.",
                "Call it on the module whose forward failed.",
            )
        self.context.reset()

    def set_scheduled(self, is_scheduled: bool) -> None:
        """Let a schedule decide about the modules and all below, or their forwards and backwards."""
        if is_scheduled and self.context is None:
            self.become_root()
        for state in self.with_those_below():
            if state.unit.is_scheduled is not is_scheduled:
                state.forget_forward()
                state.run(set_scheduled(state.unit, is_scheduled=is_scheduled))
                state.scheduled = [below.unit for below in state.with_those_below()] if is_scheduled else []
                for group in state.groups:
                    group.sum_grads_as_they_come(is_scheduled)

    def begin_schedule(self) -> RootContext:
        """All modules are about to be gathered."""
        context = self.context or self.become_root()
        if not context.structure.holds():
            context.root.become_root()
            context = self.context or context
        context.make_plan()
        context.model.expect_all()
        context.comm.ready, self.post_optim_event = self.post_optim_event, None
        return context

    def check_unsharded(self, operation: str) -> None:
        """Wait for the gather of the module's own parameters. Raises ShardingError where nobody has started it."""
        self.wait_for_unshard()
        sharded = next((group for group in self.groups if not group.state.is_unsharded), None)
        if sharded is not None:
            raise ShardingError(
                operation,
                f"{type(self.module).__name__}, which has parameter {sharded.params[0].fqn}, is sharded, and a schedule"
                " decides when it is not.",
                "Let the schedule unshard the stage before it computes, or call set_is_scheduled(False).",
                rank=sharded.sharding.mesh.get_rank(),
            )

    def run_gathered(
        self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of the module as its forward is called."""
        args, kwargs = self._pre_forward(module, args, kwargs)
        outputs = None
        self.unit.num_methods += 1
        try:
            outputs = method(*args, **kwargs)
        finally:
            self.unit.num_methods -= 1
            outputs = self._post_forward(module, args, outputs)
        return outputs

    def _before_load(self, *_: object) -> None:
        self.run(load_begins(self.unit))

    def post_backward(self) -> None:
        """The module's own backward is over. Collective."""
        self.run(backward_leaves(self.unit))

    @out_of_graphs
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, unit = (args, kwargs), self.unit
        if unit.is_scheduled:
            self.check_unsharded("forward")
            note_values(self.groups)
            taken = self._cast_inputs(args, kwargs)
            self._forwards.note(arguments, taken)
            return taken
        if is_transformed():
            refuse_transform(type(module).__name__)
        context = self.context or self.become_root()
        # Recomputation under activation checkpointing comes here during the backward pass.
        is_recomputation = backward_is_running()
        if not (is_recomputation or unit.num_methods):
            context = self._begin_forward(context)
        context.run(context.model.forward_begins(unit, is_recomputation=is_recomputation))
        is_outermost = unit.num_running == 1
        if is_outermost:
            note_values(self.groups)
        args, kwargs = self._cast_inputs(args, kwargs)
        # Of nested calls, the inputs of the outermost one signal the end of the backward of all.
        is_first = (is_recomputation or unit.begins_first()) and is_outermost
        if torch.is_grad_enabled() and self.groups and is_first:
            args, kwargs = watch_inputs(self.post_backward, args, kwargs)
        self._forwards.note(arguments, (args, kwargs))
        return args, kwargs

    def _begin_forward(self, context: RootContext) -> RootContext:
        """A forward begins that is not part of another one of the module's. Returns what the model shares now."""
        unit, model = self.unit, context.model
        unit.is_alone = not (unit.is_root or model.is_in_forward)
        if unit.is_root:
            context.begin_forward()
            if not context.structure.holds():
                context = self.become_root()
                context.begin_forward()
        elif not model.is_in_forward:
            # It is called on its own, without the root. Here, too, gathered parameters may be out of date.
            self.run(free_old(unit, written_to(self.groups) if unit.is_kept_unsharded else ()))
            if not (unit.is_kept_unsharded or context.structure.holds()):
                context.root.become_root()
                # What that does not hold any more is a root of its own.
                context = self.become_root() if self.context is None or self.context is context else self.context
        return context

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self._policy.param_dtype if self._policy.cast_forward_inputs else None
        if dtype is None:
            return args, kwargs
        return cast_floats(args, dtype), cast_floats(kwargs, dtype) if kwargs else kwargs

    def forget_forward(self) -> None:
        """None of the modules has run."""
        self._forwards.forget()

    @out_of_graphs
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        self._forwards.end()
        context, unit = self.context, self.unit
        if (unit.is_root or context is None) and outputs is None and not unit.is_scheduled:
            self._tell_of_failure()
        if context is None:
            return outputs
        model = context.model
        # After an exception there is no backward to keep anything for.
        has_failed = outputs is None and sys.exception() is not None
        if model.leaves_forward(unit):
            context.comm.ready = None
            if not has_failed:
                context.statistics.share()
        grad_will_come = torch.is_grad_enabled() and not has_failed
        num_outputs = num_watched = 0
        written = written_since(() if has_failed or unit.num_running > 1 else self.groups)
        unit.to_run.discard(module)
        gathered = [group.gathered for group in self.groups]

        def hand_out(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_outputs, num_watched
            num_outputs += 1
            num_watched += tensor.requires_grad
            # Gathered parameters are freed later, so a module must not return their memory.
            tensor = tensor.clone() if any(group.holds(tensor) for group in self.groups) else tensor
            return self._watch_output(tensor, gathered) if grad_will_come else tensor

        if self._policy.output_dtype is not None:
            outputs = cast_floats(outputs, self._policy.output_dtype)
        outputs = for_each_tensor(outputs, hand_out)
        is_unheard = not num_watched and any(group.state.is_trained for group in self.groups)
        unit.is_silent = grad_will_come and (is_unheard or num_outputs == 0)
        if not unit.is_scheduled:
            if unit.is_silent or (grad_will_come and may_hide_tensors(outputs)):
                watch_gradients(self.groups, self, ShardState._gradient_is_there)
            is_begun_only = is_begun(outputs)
            # Gathers that have failed, or that others do not come to any more, fail again; the first error is told.
            with suppress(*[DistError] * has_failed):
                context.run(
                    model.forward_ends(
                        unit, has_failed=has_failed, grad_will_come=grad_will_come, is_begun=is_begun_only
                    )
                )
            if is_begun_only and not model.is_computing(unit):
                refuse_begun(outputs, type(module).__name__)
        refuse_writes(written, type(module).__name__)
        return outputs

    def _tell_of_failure(self) -> None:
        """If the forward of this root has failed, with other ranks waiting for what would have come, tell them."""
        error, context = sys.exception(), self.context
        goes_on = torch.is_grad_enabled() or context is None or not context.model.order.is_over
        if isinstance(error, Exception) and goes_on and not is_recomputed_enough(error):
            tell_of("forward", error, [group for state in self.with_those_below() for group in state.groups])

    def _gradient_is_there(self) -> None:
        """A gathered parameter of modules whose outputs tell nothing has a gradient."""
        if self.context is not None and not self.unit.is_scheduled:
            self.context.begin_backward()

    def _watch_output(self, tensor: torch.Tensor, gathered: Sequence[object]) -> torch.Tensor:
        if tensor.requires_grad:
            # A leaf, such as an input or a parameter that is not sharded, would keep its hooks, and call those of this
            # forward in every later backward.
            tensor = tensor.view_as(tensor) if tensor.is_leaf else tensor
            begin = self._pre_backward if isinstance(tensor, DTensor) else self._pre_backward_of_plain
            tensor.register_hook(partial(begin, gathered))
        return tensor

    def _pre_backward_of_plain(self, gathered: Sequence[object], grad: torch.Tensor) -> torch.Tensor:
        return as_plain(self._pre_backward(gathered, grad))

    def _pre_backward(self, gathered: Sequence[object], grad: torch.Tensor) -> torch.Tensor:
        """The backward of a forward begins that has computed with what was `gathered`, by group."""
        unit = self.unit
        if unit.is_scheduled:
            if unit.unshards_in_backward:
                self.check_unsharded("backward")
            return grad
        context = self.context
        assert context is not None
        context.begin_backward()
        context.run(context.model.gradient_reaches(unit))
        if unit.unshards_in_backward:
            refuse_stale(self.groups, gathered, type(self.module).__name__)
        context.run(context.model.backward_enters(unit))
        return grad

    @property
    def comm(self) -> Comm:
        """Streams and buffers shared with the rest of the model, once it has a root."""
        assert self.context is not None
        return self.context.comm

    def with_those_below(self) -> list[ShardState]:
        """This state and those of all sharded modules below, in the order of the modules."""
        below = chain.from_iterable(module.modules() for module in self.modules)
        return list(dict.fromkeys(state for state in map(state_of, below) if state is not None))

    def become_root(self) -> RootContext:
        """Nothing above has run: this is where iterations begin and end. Raises ShardingError where the modules' own
        parameters are not those that were sharded."""
        states = self.with_those_below()
        for state in states:
            check_parameters(state.modules, state.groups, state.left_alone)
        for group in self.groups:
            self._reduce_in_buckets(group)
        watch_stale_optimizers(self, [group for state in states for group in state.groups])
        comm = self.shared_comm
        if comm is None and self.context is not None and self.context.root is self:
            comm = self.context.comm
        name_groups(self.modules)
        answer_for(self)
        return RootContext(self, states, Comm(self.device) if comm is None else comm)

    def _reduce_in_buckets(self, group: ParamGroup) -> None:
        """Reduce a root's gradients bucket by bucket, when they are there."""
        buckets = [] if group.state.buckets is not None else buckets_of(self.modules, group)
        if buckets:
            group.state.buckets = Buckets(buckets)
            group.gradient_is_ready = lambda number, param: self.run(
                gradient_is_ready(self.unit, group.state, number, param)
            )
            group.watch_buckets()


def state_of(module: nn.Module) -> ShardState | None:
    """The state that `fully_shard` gave the module, if it did."""
    state: ShardState | None = module.__dict__.get(STATE)
    return state


def set_state(module: nn.Module, state: ShardState) -> None:
    module.__dict__[STATE] = state
