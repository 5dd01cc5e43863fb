"""FSDPModule: what a module gains by `fully_shard`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, Self, cast

import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import is_copying
from disttrain.fsdp2.faults.failed_recordings import forget_recording
from disttrain.fsdp2.faults.lost_writes import note_request, refuse_writes_on_request
from disttrain.fsdp2.machine.schedule import finish_all, reduce_all, reshard_all, unshard_all
from disttrain.fsdp2.machine.unit import Unit, forget_grads, keep_unsharded, release, reshard
from disttrain.fsdp2.modules.wrapper_names import INSTEAD, instead_of
from disttrain.fsdp2.params.cast_copies import CastCopies
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.root import share_comm
from disttrain.fsdp2.state import ShardState, state_of


class WritesCopies(Protocol):
    """An optimizer that can write parameters once more."""

    def write_copies(self, copies: CastCopies) -> None:
        """Do so in each step, where `copies` say."""


class UnshardHandle:
    """A gather that `unshard(async_op=True)` has started."""

    def __init__(self, state: ShardState) -> None:
        self._state: ShardState | None = state

    def wait(self) -> None:
        """Have the module compute with the gathered parameters; harmless the second time."""
        if self._state is not None:
            self._state.wait_for_unshard()
            self._state.unit.is_shown_on_request = self._state.unit.is_kept_unsharded
            note_request(self._state.groups)
            self._state = None


class FSDPModule:
    """The methods that a module gains by `fully_shard`: it is an instance of this class as well as of its own.

    Settings are made by all ranks alike, between iterations; with `recurse`, for all sharded modules below, too.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name not in INSTEAD or hasattr(type(self), name):
                raise
            raise instead_of(name, type(self).__name__) from None

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own parameters, and keep them until `reshard` or the end of a backward. Collective.

        Until then they are what the module has, in place of its shards.

        With `async_op` only start to, and return a handle to wait on; the module's forward waits for itself.
        """
        state = _state(self)
        state.run(keep_unsharded(state.unit, is_running=state.is_running))
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of the module itself."""
        state = _state(self)
        state.unit.release_to_machine()
        refuse_writes_on_request(state.groups)
        state.run(release(state.unit))

    def set_is_scheduled(self, is_scheduled: bool) -> None:
        """True: leave to a schedule, such as a pipeline's, when this module and all sharded ones below are gathered and
        freed, and gradients reduced. Forwards and backwards do none of it; inputs and outputs are cast as ever.

        A forward or backward of a module that is sharded raises ShardingError. False: all is done around forwards and
        backwards again. What is whole is freed either way; gradients that were collected stay. To be called on the
        outermost sharded modules, as `unshard_all`, `reshard_all`, `reduce_grads` and `finish_grads` are.
        """
        _state(self).set_scheduled(is_scheduled)

    def unshard_all(self) -> None:
        """Start to gather this module and all below; each forward or backward waits for its own. Collective.

        What is whole already is left as it is, also where an optimizer has written to the shards since.
        """
        state = _scheduled(self, "unshard_all")
        context = state.begin_schedule()
        context.run(unshard_all(state.scheduled))
        context.comm.ready = None

    def reshard_all(self) -> None:
        """Free what was gathered of this module and all below; gradients that were collected stay."""
        state = _scheduled(self, "reshard_all")
        state.run(reshard_all(state.scheduled))

    def reduce_grads(self, scale: float = 1.0) -> None:
        """Start to reduce the gradients that all backwards have left, times `scale`, such as one over the number of
        microbatches: a reduction for each group, in the order of the modules, last first. Nothing waits. Collective.

        Each parameter that is trained receives a gradient, zeros where no rank has one: which ones ranks have used may
        differ. Nothing is done where `set_requires_gradient_sync` is False: gradients are collected on.
        """
        state = _scheduled(self, "reduce_grads")
        # Modules that were sharded together may each be called.
        if state.module is cast(nn.Module, self) and state.context is not None:
            state.run(reduce_all(state.context.model, state.scheduled, scale))

    def finish_grads(self) -> None:
        """Have the gradients of the shards on the current stream; at the end of a step, also of one without backwards.

        Those of other roots that share its streams (`share_comm_ctx`) are there then, too. Harmless the second time.
        """
        _scheduled(self, "finish_grads").run(finish_all())

    def share_comm_with(self, others: Sequence[FSDPModule]) -> None:
        """`share_comm_ctx` of this root and others, as a method for those who do not know where modules come from."""
        share_comm_ctx([self, *others])

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile the module's forward, in place, with these arguments; gathering and freeing stay outside."""
        module = cast(nn.Module, self)
        module.forward = torch.compile(module.forward, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the shards, also where modules compute with unsharded parameters at the moment."""
        for state in _states(self, recurse=True):
            state.run(forget_grads(state.unit))
            for group in state.groups:
                group.zero_grads(set_to_none=set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception has ended; the root's next forward does so by itself."""
        _state(self).reset_iteration()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False, on the root: the next backward is one of several; gradients need not have come when it ends."""
        _state(self).unit.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward passes add to unsharded gradients on each rank; nothing is reduced until it is True again."""
        for state in _states(self, recurse=recurse):
            state.unit.reduces = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context as DistributedDataParallel's: backwards inside it add to gradients on each rank, and the first one
        after it reduces them. On leaving it `set_requires_gradient_sync` is as it was before."""
        units = [state.unit for state in _states(self, recurse=True)]
        before = [unit.reduces for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, reduces in zip(units, before, strict=True):
                unit.reduces = reduces

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: gradients are reduced over the ranks that share parameters, but not over those that hold copies, until
        it is True again."""
        for state in _states(self, recurse=recurse):
            for group in state.groups:
                group.state.reduces_over_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether unsharded parameters are freed between forward and backward."""
        for state in _states(self, recurse=recurse):
            state.unit.reshard_after_forward = reshard_after_forward
            _plan_anew(state)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay whole after a backward, for one more forward of an accumulated gradient's."""
        for state in _states(self, recurse=recurse):
            state.unit.reshard_after_backward = reshard_after_backward
            _plan_anew(state)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward needs no parameter of this module, as that of an embedding; they are not gathered for it."""
        _state(self).unit.unshards_in_backward = unshard_in_backward
        _plan_anew(_state(self))

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' parameters as soon as this one's are there, in place of the one learnt to follow."""
        _state(self).unit.forward_prefetch = _units("set_modules_to_forward_prefetch", modules)
        _plan_anew(_state(self))

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The same for backward."""
        _state(self).unit.backward_prefetch = _units("set_modules_to_backward_prefetch", modules)
        _plan_anew(_state(self))

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True: reductions have a communicator of their own, and wait for no gather; False: they share one with them.

        Unless this or a `TransferPolicy` says, it is so between hosts. Call it alike on all ranks.
        """
        for state in _states(self, recurse=recurse):
            state.transfers = replace(state.transfers, reduces_apart=enable)
            _plan_anew(state)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """On the root: the next forward's gathers wait for this event, in place of everything on the current stream."""
        _state(self).post_optim_event = event

    def round_in_step(self, optimizer: WritesCopies) -> None:
        """Let `optimizer`, one of `disttrain.kernels`, write with each step the rounded shards that are gathered next:
        of parameters in fp32 that are computed with in fewer bits. They take memory until the next backward has ended.

        Nothing but that optimizer and torch's own operators may write to the parameters.
        """
        groups = [group for state in _states(self, recurse=True) for group in state.groups]
        optimizer.write_copies(CastCopies([group for group in groups if type(group) is ParamGroup]))

    def obstacle_to_capture(self) -> str:
        """Why a CUDA graph of a step can't begin or end here, a whole sentence; empty where it can."""
        groups = [group for state in _states(self, recurse=False) for group in state.groups]
        if any(group.is_offloaded for group in groups):
            return (
                f"{type(self).__name__} has a CPUOffloadPolicy, whose optimizer steps on the CPU: no graph can hold it."
            )
        if any(group.has_unreduced or group.has_grads for group in groups):
            return (
                f"{type(self).__name__} has gradients that are not reduced yet, which the next replay would not add to."
            )
        return ""

    def forget_recording(self) -> None:
        """A CUDA graph of a step could not be recorded: nothing of what was queued for it is there. `capture_step`
        calls it on all modules."""
        for state in _states(self, recurse=False):
            forget_recording(state)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the gradients by `factor` in place of the number of ranks."""
        for group in _state(self).groups:
            group.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's earlier name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let transports sum, and divide apart from that, where they could average."""
        for group in _state(self).groups:
            group.only_sums = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: parameters without a gradient take part, and receive one, too.

        Needed where a parameter gets a gradient on some ranks and none on others: a rank on which it got none would
        otherwise leave its part of the parameter as it is.
        """
        for state in _states(self, recurse=recurse):
            for group in state.groups:
                group.state.reduces_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call `hook` with each flat buffer of reduced gradients, to be changed in place, on `stream` or on ours."""
        for state in _states(self, recurse=True):
            for group in state.groups:
                group.hook, group.hook_stream = hook, stream

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # What `half`, `to` and the like change is the shards, also while the module computes with unsharded parameters.
        _state(self).run(reshard(_state(self).unit))
        return cast(Self, super()._apply(fn, recurse))  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_copying():
            raise ShardingError(
                "pickle",
                f"this {type(self).__name__} is sharded: one rank's part of it means nothing to another process.",
                "Save its state with disttrain.checkpoint, or pickle a plain module that has loaded the whole one"
                " (get_model_state_dict with StateDictOptions(full_state_dict=True)).",
                rank=_rank_of(_state(self)),
            )
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> object:
        """The state of a deep copy; its parameters are shards."""
        _state(self).run(reshard(_state(self).unit))
        return super().__getstate__()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let parameters be gathered around this method of a sharded module as they are around its forward.

    Does nothing to a module that is not sharded.
    """
    if state_of(module) is None:
        return
    if not hasattr(module, method_name):
        raise ShardingError(
            "register_fsdp_forward_method",
            f"{type(module).__name__} has no method {method_name!r}.",
            "Name one that it has.",
        )
    method = getattr(module, method_name)
    is_bound = isinstance(method, types.MethodType) and method.__self__ is module

    @functools.wraps(method)
    def gathered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A copy of the module has this function, too, and computes with its own parameters.
        bound = types.MethodType(method.__func__, self) if is_bound else method
        return _state(self).run_gathered(self, bound, args, kwargs)

    setattr(module, method_name, types.MethodType(gathered, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline, use the same streams for communication."""
    share_comm([_state_for("share_comm_ctx", module) for module in modules])


def _states(module: object, *, recurse: bool) -> list[ShardState]:
    modules = cast(nn.Module, module).modules() if recurse else [cast(nn.Module, module)]
    return list(dict.fromkeys(state for state in map(state_of, modules) if state is not None))


def _state(module: object) -> ShardState:
    state = state_of(cast(nn.Module, module))
    assert state is not None, "fully_shard sets the state together with the class"
    return state


def _rank_of(state: ShardState) -> int | None:
    return state.groups[0].sharding.mesh.get_rank() if state.groups else None


def _plan_anew(state: ShardState) -> None:
    """Forgets the plan of transfers, since what decides it has changed; the root's next forward plans."""
    if state.context is not None:
        state.context.is_planned = False


def _scheduled(module: object, operation: str) -> ShardState:
    state = _state(module)
    if not state.scheduled:
        raise ShardingError(
            operation,
            f"no schedule decides about this {type(module).__name__}.",
            "Call set_is_scheduled(True) first, or leave it to forwards and backwards.",
        )
    return state


def _units(operation: str, modules: Sequence[object]) -> list[Unit]:
    return [_state_for(operation, module).unit for module in modules]


def _state_for(operation: str, module: object) -> ShardState:
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ShardingError(operation, f"a {type(module).__name__} is not sharded.", "Call fully_shard on it first.")
    return state
