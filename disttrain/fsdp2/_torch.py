"""The only file of `fsdp2` that uses torch's private names, of modules, autograd and sharding kernels."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, methodcaller
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.utils import stateless
from torch.utils.hooks import RemovableHandle

without_overrides: Any = torch._C.DisableTorchFunctionSubclass
"""Within it torch does not look for a subclass's `__torch_function__`, so reading an attribute takes half the time."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Owner = TypeVar("_Owner")

_AS_IT_IS = nullcontext()
_VERSION = attrgetter("_version")
_ADDRESS = methodcaller("data_ptr")
_REQUIRES_GRAD = attrgetter("requires_grad")
_GRADIENT = attrgetter("grad")
_LAYOUT = attrgetter("layout")
_BACKWARD_HOOKS = attrgetter("_backward_hooks")
_POST_ACCUMULATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own parameters by name, to be read and written: on the hot path `setattr` checks too much."""
    return cast(dict[str, torch.Tensor | None], module._parameters)


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's children by name, as they are registered."""
    return module._modules


def are_same(ones: Iterable[object], others: Iterable[object]) -> bool:
    """True if each of the first objects is the second one at the same position."""
    return all(map(is_, ones, others))


def which_require_grad(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each tensor, whether it requires a gradient."""
    with without_overrides():
        return [*map(_REQUIRES_GRAD, tensors)]


def gradients_of(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient of each leaf, as far as there is one."""
    with without_overrides():
        return [*map(_GRADIENT, leaves)]


def plain_gradients(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The gradients of leaves that all ask for one, and all have a dense tensor of no subclass; None otherwise."""
    with without_overrides():
        grads = [*map(_GRADIENT, leaves)]
        are_plain = (
            are_same(map(type, grads), repeat(torch.Tensor))
            and are_same(map(_LAYOUT, grads), repeat(torch.strided))
            and all(map(_REQUIRES_GRAD, leaves))
        )
    return grads if are_plain else None


def drop_gradients(leaves: Iterable[torch.Tensor]) -> None:
    """Have none of the leaves have a gradient."""
    with without_overrides():
        for leaf in leaves:
            leaf.grad = None


def is_functional_call() -> bool:
    """True within `torch.func.functional_call` on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is stateless._functional_call.__code__:
            return True
        frame = frame.f_back
    return False


def is_copying() -> bool:
    """True where the caller's caller is Python's `copy`, which asks for the same as `pickle` does."""
    return sys._getframe(2).f_globals.get("__name__") == copy.__name__


def is_transformed() -> bool:
    """True within a transform of torch.func, such as grad or vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batched(tensor: object) -> bool:
    """True for a tensor that represents a batch, as `is_grads_batched=True` makes it."""
    return isinstance(tensor, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(tensor)


def registered_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Returns what is registered under the name now."""
    return module._parameters.get(name)


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the module itself, not of its children; a parameter with two names comes twice."""
    return [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that `tensor` is a view of; itself when it is none."""
    base = tensor._base
    return tensor if base is None else base


def out_of_inference() -> AbstractContextManager[object]:
    """Out of inference mode; to leave it takes longer than to ask."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def out_of_grad() -> AbstractContextManager[object]:
    """Out of grad mode; so is a backward, and to leave it takes ten times as long as to ask."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


def backward_is_running() -> bool:
    """True when this thread is inside a backward pass, as in a recomputation under activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` once when the backward pass that is running now has ended."""
    Variable._execution_engine.queue_callback(callback)


def have_hooks(leaves: Sequence[torch.Tensor], own_hook: Callable[..., Any]) -> bool:
    """True if a hook other than `own`, which is called after the gradient has been added, waits for the gradient of a
    leaf."""
    # All of it runs in C, since it is called for each parameter in each step.
    with without_overrides():
        if any(map(_BACKWARD_HOOKS, leaves)):
            return True
        later = chain.from_iterable(map(dict.values, filter(None, map(_POST_ACCUMULATE_HOOKS, leaves))))
        return any(map(is_not, later, repeat(own_hook)))


def gradient_hooks(leaf: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    """Returns the hooks that `register_hook` has left there."""
    hooks = leaf._backward_hooks
    return tuple(hooks.values()) if hooks else ()


def call_when_added(leaf: torch.Tensor, owner: _Owner, call: Callable[[_Owner], None]) -> RemovableHandle:
    """Has `call(owner)` called when a gradient has been added to `leaf`, while something else keeps `owner`.

    Python's collector does not look into these hooks (torch 2.13): an owner that holds the leaf would live for ever,
    and so would a model. `call` must not hold it either.
    """
    kept = ref(owner)

    def hook(_: torch.Tensor) -> None:
        if (there := kept()) is not None:
            call(there)

    # As a plain tensor's: a DTensor's hook may have to wait for the end of the backward.
    return torch.Tensor.register_post_accumulate_grad_hook(leaf, hook)  # type: ignore[no-any-return, no-untyped-call]


def post_accumulate_hooks(leaf: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    """Returns the hooks that `register_post_accumulate_grad_hook` has left there."""
    hooks = leaf._post_accumulate_grad_hooks
    return tuple(hooks.values()) if hooks else ()


@contextmanager
def without_post_accumulate_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, no hook runs after these leaves' gradients have been accumulated."""
    removed = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._post_accumulate_grad_hooks)]
    for hooks, _ in removed:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copies in removed:
            hooks.update(copies)


def wrap_engine_calls(wrapper: Callable[..., Any]) -> None:
    """Have `wrapper` called, with torch's own function first, in place of each call of the engine by torch.autograd."""
    torch.autograd._engine_run_backward = partial(wrapper, torch.autograd._engine_run_backward)  # type: ignore[attr-defined]


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Numbers that change when torch's operators write to any of the tensors, or to a view of it."""
    with without_overrides():
        return tuple(map(_VERSION, tensors))


def values_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Versions, then addresses. They change when the tensors are written to, or their `.data` is replaced."""
    with without_overrides():
        return (*map(_VERSION, tensors), *map(_ADDRESS, tensors))


def plain_memory(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The values of a parameter, or of a DTensor's part; None if it has no values, or is another subclass."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if type(local) not in (torch.Tensor, nn.Parameter) or local.is_meta or torch._C._len_torch_dispatch_stack():
        return None
    return cast(torch.Tensor, local.detach())


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage, wherever that lies at the moment."""
    return cast(int, getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)


_OF_SEVERAL = "register_multi_grad_hook.<locals>.get_inner_hook.<locals>.inner_hook"


class SeveralGradients(NamedTuple):
    """A hook of `register_multi_grad_hook` at one of several leaves, which is called with the gradients of all."""

    key: int
    """The same at all of them."""
    function: Callable[[Sequence[torch.Tensor | None]], None]
    position: int
    num_tensors: int


def several_gradients(hook: Callable[..., Any]) -> SeveralGradients | None:
    """None for hooks of one leaf alone."""
    inner: Any = hook
    while getattr(getattr(inner, "__code__", None), "co_qualname", "") != _OF_SEVERAL:
        # A DTensor's own check of what a hook returns is around it.
        inner = getattr(inner, "__wrapped__", None)
        if inner is None:
            return None
    cells = zip(inner.__code__.co_freevars, inner.__closure__, strict=True)
    contents = {name: cell.cell_contents for name, cell in cells if name in ("buffer", "fn", "idx", "len_tensors")}
    return SeveralGradients(id(contents["buffer"]), contents["fn"], contents["idx"], contents["len_tensors"])


def move_hooks(leaf: torch.Tensor, to: torch.Tensor) -> None:
    """Moves the hooks that wait for the gradient of a leaf to another leaf; their handles stay valid."""
    to._backward_hooks = leaf._backward_hooks
    hooks, target_hooks = leaf._post_accumulate_grad_hooks, to._post_accumulate_grad_hooks
    if hooks:
        hooks.update(target_hooks or {})
        to._post_accumulate_grad_hooks = hooks


def out_of_graphs(function: _Function) -> _Function:
    """Keeps Dynamo from tracing functions that gather and free, and all that they call.

    A module that is compiled with its hooks has graphs between them.

    It does what `torch.compiler.disable` does, but that would load the compiler also for users who do not compile.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(cast(Any, function).__code__, frames._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True
    return function


def compile_forward_alone(module: nn.Module) -> None:
    """Of a module that nn.Module.compile has compiled with its hooks, compile the forward in the same way instead."""
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        return
    # Only the context that made the function knows the arguments of torch.compile.
    closure = dict(zip(compiled.__code__.co_freevars, compiled.__closure__, strict=True))
    module.forward = closure["self"].cell_contents(module.forward)
    module._compiled_call_impl = None
