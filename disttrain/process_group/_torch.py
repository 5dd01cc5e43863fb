"""Marks functions that Dynamo must not trace, has classes of tensors dispatch, and asks whether a profiler runs.

It also makes each of torch's operators one object, where threads ask for it together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import _ops
from torch._library import simple_registry

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type[torch.Tensor])

profiler: Any = torch.autograd.profiler
"""Its `_is_profiler_enabled` is torch's own "useful for fast python checks": whether a profiler records this process,
or `emit_nvtx` is entered. An attribute takes a third of the time of any call, and each collective looks at it."""


def keep_dynamo_out(*functions: Any) -> None:
    """Let `functions`, and what they call, run as they are where compiled code calls them outside of its graphs.

    Dynamo looks at every frame that begins beneath a compiled function; torch's own subclasses it knows.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame
    leave = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, leave)


_IN_PLACE: Final = (
    "of disttrain's collectives that write in place, a graph holds all_reduce, broadcast, all_gather of equal parts, "
    "all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single, all without async_op. Call others outside of "
    "the compiled function, or take one of disttrain.process_group.functional"
)


def outside_graphs(function: _Function, reason: str = _IN_PLACE) -> _Function:
    """`function`, which Dynamo does not read: it breaks the graph there, or says why where there must be one graph.

    torch.compiler.disable would load Dynamo, and take time at every call.
    """
    keep_dynamo_out(function)
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    return function


@outside_graphs
def run_outside(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls `function` outside of compiled graphs, and returns its result."""
    return function(*arguments)


_DISPATCHES: Final[dict[type, Callable[..., Any]]] = {}
_find_rule: Final = simple_registry.find_torch_dispatch_rule


def _find_rule_or_dispatch(op: Any, torch_dispatch_class: type) -> Callable[..., Any] | None:
    return _find_rule(op, torch_dispatch_class) or _DISPATCHES.get(torch_dispatch_class)


keep_dynamo_out(_find_rule_or_dispatch)
# torch takes hold of this function at the first operator of any class that dispatches.
simple_registry.find_torch_dispatch_rule = _find_rule_or_dispatch


def dispatches(cls: _Class) -> _Class:
    """Has torch find `__torch_dispatch__` of a class of tensors where it looks for rules of single operators.

    Where it finds none there, torch 2.13 asks whether the tensor is one of its own DTensor, which it imports for that:
    800 modules, sympy among them, and a second of each process.
    """
    dispatch: Any = cls.__torch_dispatch__
    _DISPATCHES[cls] = dispatch.__func__
    return cls


_MAKING: Final = threading.RLock()


def _made_once(make: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """`make`, a `__getattr__` that keeps what it makes as an attribute, by one thread at a time.

    Of two threads that ask torch 2.13 for the same new operator, each makes one. The later is kept, but the first may
    be the one of which torch's C++ keeps the address: the next call of it, by any thread, reads memory that was freed.
    """

    def made_once(self: Any, name: str) -> Any:
        with _MAKING:
            kept = self.__dict__.get(name)
            return make(self, name) if kept is None else kept

    return made_once


for _namespace in (_ops._Ops, _ops._OpNamespace, _ops.OpOverloadPacket):
    _namespace.__getattr__ = _made_once(_namespace.__getattr__)  # type: ignore[method-assign]
# A process that is forked meanwhile has only the thread that forks it: the others' lock would be held for ever.
os.register_at_fork(before=_MAKING.acquire, after_in_parent=_MAKING.release, after_in_child=_MAKING.release)
