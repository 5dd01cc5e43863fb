"""What happens around a module's forward and backward: gather before, free after, reduce gradients, prefetch the next.

Follows the hooks of PyTorch's FSDP2 (pre-forward, post-forward, a hook on the outputs' gradients for pre-backward, an
autograd function on the inputs for post-backward, a callback at the end of the backward pass).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import backward_is_running, is_transformed, out_of_graphs
from disttrain.fsdp2.asked_grads import answer_for
from disttrain.fsdp2.checks import is_begun, refuse_begun, refuse_transform
from disttrain.fsdp2.comm import Comm, Named
from disttrain.fsdp2.given import take_up
from disttrain.fsdp2.handed_back import Forwards
from disttrain.fsdp2.lone_errors import tell_of_failure
from disttrain.fsdp2.lost_writes import note_values, refuse_writes, written_since
from disttrain.fsdp2.nests import cast_floats, for_each_tensor, may_hide_tensors
from disttrain.fsdp2.param_group import ParamGroup
from disttrain.fsdp2.policies import MixedPrecisionPolicy, TransferPolicy
from disttrain.fsdp2.post_backward import watch_inputs
from disttrain.fsdp2.root import RootContext
from disttrain.fsdp2.scheduled import check_whole
from disttrain.fsdp2.silent_outputs import watch_gradients
from disttrain.fsdp2.stale_graphs import free_old, refuse_stale
from disttrain.fsdp2.stale_optimizers import watch_stale_optimizers
from disttrain.fsdp2.state_dicts import show_shards_in_state_dicts
from disttrain.fsdp2.structure import STATE, check_parameters, name_groups


class ShardState:
    """The state of one module that `fully_shard` was called on, or of several that it was called on together."""

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
        self.left_alone = left_alone
        """Parameters of the modules that no group has taken."""
        self.context: RootContext | None = None
        self.requires_gradient_sync = True
        self._policy = policy
        self.device = device
        self.reshard_after_forward: bool | int | None = reshard_after_forward
        self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.is_last_backward = True
        self.forward_prefetch: list[ShardState] | None = None
        self.backward_prefetch: list[ShardState] | None = None
        self.post_optim_event: torch.Event | None = None
        self.transfers = transfers
        self.mates: frozenset[ShardState] = frozenset()
        """Modules, this one too, whose parameters are gathered with those of this one."""
        self.shared_comm: Comm | None = None
        """The one that other roots use as well, where the user wants it so."""
        self.is_kept_unsharded = False
        """True once the user has gathered the parameters, until their backward or until the user frees them."""
        self.is_shown_on_request = False
        """True where the user has waited for that: modules have the gathered ones as long."""
        self.scheduled: list[ShardState] | None = None
        """Where a schedule decides when to gather, free and reduce: this state and those below."""
        self.is_silent = False
        """True where no tensor of the outputs, if there is one, tells that the backward begins."""
        self._awaits_post_backward = False
        self._is_alone = False
        """True where its last forward was called without the root's: others may not come, and are not gathered for."""
        self._is_root = False
        self._num_methods = 0
        """Methods other than forward that are under way; within them, the module's forward is no new one."""
        self._num_running = 0
        """Forwards of the module that are under way: it may call itself."""
        self._to_run: set[nn.Module] = set()
        """Those of several modules that have not run since the first of them did."""
        self._forwards = Forwards()
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, always_call=True)
            module.register_load_state_dict_pre_hook(self._before_load)
            show_shards_in_state_dicts(module, groups)

    def __getstate__(self) -> dict[str, object]:
        """What a deep copy takes over: a module that has not run yet."""
        return {
            **self.__dict__,
            "context": None,
            "mates": frozenset(),
            "shared_comm": None,
            "post_optim_event": None,
            "is_kept_unsharded": False,
            "is_shown_on_request": False,
            "scheduled": None,
            "_awaits_post_backward": False,
            "_is_alone": False,
            "_is_root": False,
            "_num_methods": 0,
            "_num_running": 0,
            "_to_run": set(),
        }

    def unshard(self, *, alone: bool = False) -> None:
        """Start gathering the module's own parameters, and, unless `alone`, those that go with them. Collective."""
        for group in self.groups:
            with Named(group):
                group.unshard(alone=alone)

    def keep_unsharded(self) -> None:
        """Start gathering, for the user. Collective."""
        context = self.context
        is_running = context is not None and (context.is_in_forward or context.is_in_backward)
        if not (self.is_kept_unsharded or is_running):
            # What is there since a forward may have been written to.
            self.reshard()
        self.unshard(alone=not is_running)
        self.is_kept_unsharded = True

    def wait_for_unshard(self) -> None:
        """Have the module compute with the gathered parameters."""
        for group in self.groups:
            group.wait_for_unshard()
        self.show()

    def show(self) -> None:
        """Have the module compute with the gathered parameters, where it has them, or with what it was given."""
        for group in self.groups:
            others = group.show()
            if others:
                take_up(group, others, self.device)

    def show_shards(self) -> None:
        """Let whoever asks the module have the shards, but where the user has asked for gathered parameters."""
        if not self.is_shown_on_request:
            for group in self.groups:
                group.hide()

    def reshard(self, keep_on: int | None = None) -> None:
        for group in self.groups:
            group.reshard(keep_on)

    def reset_iteration(self) -> None:
        """Forget an iteration that has ended with an exception."""
        if self.context is None or not self._is_root:
            raise ShardingError(
                "reset_iter_state",
                "this module is no root that has run.",
                "Call it on the module whose forward failed.",
            )
        self.context.reset()

    def run_gathered(
        self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of the module as its forward is called."""
        args, kwargs = self._pre_forward(module, args, kwargs)
        outputs = None
        self._num_methods += 1
        try:
            outputs = method(*args, **kwargs)
        finally:
            self._num_methods -= 1
            outputs = self._post_forward(module, args, outputs)
        return outputs

    def _before_load(self, *_: object) -> None:
        if self.is_kept_unsharded:
            self.reshard()
        for group in self.groups:
            group.hide()

    def post_backward(self, *, at_end: bool) -> None:
        """Free the module's whole parameters and reduce their gradients; harmless when that was done. Collective."""
        self._awaits_post_backward = False
        for group in reversed(self.groups):
            if self.reshard_after_backward:
                group.reshard()
            if self.requires_gradient_sync:
                with Named(group):
                    group.reduce_grads(at_end=at_end)
            else:
                group.keep_grads()

    def abandon_backward(self) -> None:
        """Forget the gradients of whole parameters, and that a backward pass was under way."""
        self._awaits_post_backward = False
        for group in self.groups:
            group.drop_grads()

    @out_of_graphs
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args, kwargs
        if self.scheduled is not None:
            check_whole(self, "forward")
            note_values(self.groups)
            taken = self._cast_inputs(args, kwargs)
            self._forwards.note(given, taken)
            return taken
        if is_transformed():
            refuse_transform(type(module).__name__)
        context = self.context or self.become_root()
        # Recomputation under activation checkpointing comes here during the backward pass, out of the learnt order.
        is_recomputation = backward_is_running()
        is_within = is_recomputation or self._num_methods > 0
        if not is_within:
            self._is_alone = not (self._is_root or context.is_in_forward)
        if self._is_root and not is_within:
            context.begin_forward()
            if not context.structure.holds():
                context = self.become_root()
                context.begin_forward()
        elif not (context.is_in_forward or is_within):
            # Called on its own, without the root: here, too, what was gathered may have been overwritten since.
            free_old(self.groups, is_kept=self.is_kept_unsharded)
            if not (self.is_kept_unsharded or context.structure.holds()):
                context.root.become_root()
                # What that does not hold any more is a root of its own.
                context = self.become_root() if self.context in (None, context) else self.context
        self.unshard(alone=self._is_alone)
        self.wait_for_unshard()
        if not self._num_running:
            note_values(self.groups)
        self._num_running += 1
        if context.is_in_forward and not is_recomputation:
            following = context.order.visit(self, self.mates)
            for state in self._next(self.forward_prefetch, following):
                state.unshard()
        args, kwargs = self._cast_inputs(args, kwargs)
        # Of calls within each other the outermost's inputs tell that the backward of all is over.
        is_first = (is_recomputation or self._begins_with(module)) and self._num_running == 1
        if torch.is_grad_enabled() and self.groups and is_first:
            args, kwargs = watch_inputs(self, args, kwargs)
        self._forwards.note(given, (args, kwargs))
        return args, kwargs

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self._policy.param_dtype if self._policy.cast_forward_inputs else None
        return (args, kwargs) if dtype is None else (cast_floats(args, dtype), cast_floats(kwargs, dtype))

    def _begins_with(self, module: nn.Module) -> bool:
        """True for the first of the modules to run: with its inputs' gradients, the backward of all is over."""
        is_first = not self._to_run
        if is_first:
            self._to_run.update(self.modules)
        return is_first or len(self.modules) == 1

    def forget_forward(self) -> None:
        """None of the modules has run."""
        self._to_run.clear()
        self._forwards.forget()
        self._num_running = 0

    @out_of_graphs
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        self._forwards.end()
        context = self.context
        if (self._is_root or context is None) and outputs is None and self.scheduled is None:
            tell_of_failure(self)
        if context is None:
            return outputs
        ends_iteration = self._is_root and not self._num_methods
        if ends_iteration:
            context.is_in_forward, context.comm.ready = False, None
        # After an exception there is no backward to keep anything for.
        has_failed = outputs is None and sys.exception() is not None
        grad_will_come = torch.is_grad_enabled() and not has_failed
        num_outputs = num_watched = 0
        written = written_since(() if has_failed or self._num_running > 1 else self.groups)
        self._to_run.discard(module)
        gathered = [group.gathered for group in self.groups]

        def hand_out(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_outputs, num_watched
            num_outputs += 1
            num_watched += tensor.requires_grad
            # A gathered parameter is freed later on: what a module returns of it must not go with it.
            tensor = tensor.clone() if any(group.holds(tensor) for group in self.groups) else tensor
            return self._watch_output(tensor, gathered) if grad_will_come else tensor

        if self._policy.output_dtype is not None:
            outputs = cast_floats(outputs, self._policy.output_dtype)
        outputs = for_each_tensor(outputs, hand_out)
        is_unheard = not num_watched and any(group.is_trained for group in self.groups)
        self.is_silent = grad_will_come and (is_unheard or num_outputs == 0)
        if self.scheduled is not None:
            refuse_writes(written, type(module).__name__)
            return outputs
        watch_gradients(self, may_be_hidden=grad_will_come and may_hide_tensors(outputs))
        # Where no tensor is found in the outputs, nothing will tell that the backward begins.
        is_needed = self.is_kept_unsharded or self._awaits_post_backward or self.is_silent
        self._num_running = max(self._num_running - 1, 0)
        is_needed = is_needed or (bool(self._to_run) and not has_failed) or self._num_running > 0 or is_begun(outputs)
        if not is_needed and (self._frees_after_forward() or not grad_will_come):
            self.reshard(self._ranks_after_forward() if grad_will_come else None)
        if ends_iteration and not grad_will_come:
            context.comm.finish_upload()
            for state in context.states:
                if not (state.is_kept_unsharded or state._awaits_post_backward):
                    state.reshard()
        # What is kept for the backward is in modules until the root's forward has ended, which may compute with it.
        if not (context.is_in_forward or context.is_in_backward or self._num_running):
            (context if self._is_root else self).show_shards()
            refuse_begun(outputs, type(module).__name__)
        refuse_writes(written, type(module).__name__)
        return outputs

    def _frees_after_forward(self) -> bool:
        # The root's backward comes right after its forward: freeing in between would only gather twice.
        return not self._is_root if self.reshard_after_forward is None else self.reshard_after_forward is not False

    def _ranks_after_forward(self) -> int | None:
        return None if isinstance(self.reshard_after_forward, bool | None) else self.reshard_after_forward

    def _watch_output(self, tensor: torch.Tensor, gathered: Sequence[object]) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(partial(self._pre_backward, gathered))
        return tensor

    def _pre_backward(self, gathered: Sequence[object], grad: torch.Tensor) -> torch.Tensor:
        """The backward of a forward begins that has computed with what was `gathered`, by group."""
        if self.scheduled is not None:
            if self.unshards_in_backward:
                check_whole(self, "backward")
            return grad
        context = self.context
        assert context is not None
        context.begin_backward()
        self._awaits_post_backward = True
        if self.unshards_in_backward:
            self.unshard(alone=self._is_alone)
            refuse_stale(self.groups, gathered, type(self.module).__name__)
            self.wait_for_unshard()
        following = context.order.backward_from(self, self.mates)
        for state in self._next(self.backward_prefetch, following):
            if state.unshards_in_backward:
                state.unshard()
        return grad

    @staticmethod
    def _next(chosen: list[ShardState] | None, learnt: ShardState | None) -> list[ShardState]:
        """Whose parameters to gather ahead: what the user has chosen, else what came next in the last iteration."""
        return chosen if chosen is not None else [] if learnt is None else [learnt]

    @property
    def comm(self) -> Comm:
        """What is shared with the rest of the model, once it has a root."""
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
            check_parameters(state)
        self._is_root = True
        for state in states:
            if state is not self:
                state._is_root = False
        for group in self.groups if len(self.modules) == 1 else ():
            group.reduce_early(self.modules[0], lambda: self.requires_gradient_sync and self.scheduled is None)
        watch_stale_optimizers(self, [group for state in states for group in state.groups])
        comm = self.shared_comm
        if comm is None and self.context is not None and self.context.root is self:
            comm = self.context.comm
        name_groups(self.modules)
        answer_for(self)
        return RootContext(self, states, Comm(self.device) if comm is None else comm)


def state_of(module: nn.Module) -> ShardState | None:
    """The state that `fully_shard` gave the module, if it did."""
    state: ShardState | None = module.__dict__.get(STATE)
    return state


def set_state(module: nn.Module, state: ShardState) -> None:
    module.__dict__[STATE] = state
