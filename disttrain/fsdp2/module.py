"""FSDPModule: what a module gains by `fully_shard`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, cast

import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.fsdp2.state import ShardState, share_comm, state_of


class UnshardHandle:
    """A gather that `unshard(async_op=True)` has started."""

    def __init__(self, state: ShardState) -> None:
        self._state: ShardState | None = state

    def wait(self) -> None:
        """Have the module compute with the gathered parameters; harmless the second time."""
        if self._state is not None:
            self._state.wait_for_unshard()
            self._state = None


class FSDPModule:
    """What a module gains by `fully_shard`: it is an instance of this class as well as of its own.

    Settings are made by all ranks alike, between iterations; with `recurse`, for all sharded modules below, too.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own parameters, and keep them until `reshard` or the end of a backward. Collective.

        With `async_op` only start to, and return a handle to wait on; the module's forward waits for itself.
        """
        state = _state(self)
        state.unshard()
        state.is_kept_unsharded = True
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of the module itself."""
        state = _state(self)
        state.reshard()
        state.is_kept_unsharded = False

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile the module's forward, in place, with these arguments; gathering and freeing stay outside."""
        module = cast(nn.Module, self)
        module.forward = torch.compile(module.forward, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the shards, also where modules compute with whole parameters at the moment."""
        for state in _states(self, recurse=True):
            for group in state.groups:
                group.zero_grads(set_to_none=set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception has ended; the root's next forward does so by itself."""
        _state(self).reset_iteration()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False, on the root: the next backward is one of several; gradients need not have come when it ends."""
        _state(self).is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward passes add to whole gradients on each rank; nothing is reduced until it is True again."""
        for state in _states(self, recurse=recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: gradients are reduced over the ranks that share parameters, but not over those that hold copies, until
        it is True again."""
        for state in _states(self, recurse=recurse):
            for group in state.groups:
                group.reduces_over_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether whole parameters are freed between forward and backward."""
        for state in _states(self, recurse=recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay whole after a backward, for one more forward of an accumulated gradient's."""
        for state in _states(self, recurse=recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward needs no parameter of this module, as that of an embedding; they are not gathered for it."""
        _state(self).unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' parameters as soon as this one's are there, in place of the one learnt to follow."""
        _state(self).forward_prefetch = [_state_for("set_modules_to_forward_prefetch", module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The same for backward."""
        _state(self).backward_prefetch = [_state_for("set_modules_to_backward_prefetch", module) for module in modules]

    def set_post_optim_event(self, event: torch.Event) -> None:
        """On the root: the next forward's gathers wait for this event, in place of everything on the current stream."""
        _state(self).post_optim_event = event

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
                group.reduces_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call `hook` with each flat buffer of reduced gradients, to be changed in place, on `stream` or on ours."""
        for state in _states(self, recurse=True):
            for group in state.groups:
                group.hook, group.hook_stream = hook, stream

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # What `half`, `to` and the like change is the shards, also while the module computes with whole parameters.
        _state(self).reshard()
        return cast(Self, super()._apply(fn, recurse))  # type: ignore[misc]

    def __getstate__(self) -> object:
        """What a deep copy takes over; its parameters are shards."""
        _state(self).reshard()
        return super().__getstate__()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let parameters be gathered around this method of a sharded module as they are around its forward.

    Does nothing to a module that is not sharded.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ShardingError(
            "register_fsdp_forward_method",
            f"{type(module).__name__} has no method {method_name!r}.",
            "Name one that it has.",
        )
    method = getattr(module, method_name)

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        return state.run_gathered(module, method, args, kwargs)

    setattr(module, method_name, gathered)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline, use the same streams for communication."""
    share_comm([_state_for("share_comm_ctx", module) for module in modules])


def _states(module: object, *, recurse: bool) -> Iterable[ShardState]:
    modules = cast(nn.Module, module).modules() if recurse else [cast(nn.Module, module)]
    return list(dict.fromkeys(state for state in map(state_of, modules) if state is not None))


def _state(module: object) -> ShardState:
    state = state_of(cast(nn.Module, module))
    assert state is not None, "fully_shard sets the state together with the class"
    return state


def _state_for(operation: str, module: object) -> ShardState:
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ShardingError(operation, f"a {type(module).__name__} is not sharded.", "Call fully_shard on it first.")
    return state
