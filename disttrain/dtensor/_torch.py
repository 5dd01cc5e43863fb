"""The only file of `dtensor` that uses torch's private names, of tensor subclasses, operator schemas and optimizers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from operator import attrgetter
from typing import Any, Final, NoReturn, TypeVar, cast

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.autograd import Variable, forward_ad, graph
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils as torch_foreach
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "BOUND_FUNCTIONS", "BOUND_LINALG", "BOUND_METHODS", "DispatchMode", "OpFacts", "OpOverload", "above_autograd",
    "are_counted_together", "as_one_call", "backward_number", "become", "binding_of", "catch_operator",
    "change_wrapper", "composed", "composed_in_inference", "facts_of", "handle_of", "hint_of",
    "is_called_by_autograd", "is_kept_for_later", "is_traced", "is_transformed", "make_wrapper",
    "no_torch_function", "off_the_record", "put_on_record", "refuse_caching", "tree_flatten", "tree_leaves",
    "tree_unflatten", "use_foreach_for", "when_backward_ends", "without_overrides",
]  # fmt: skip

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that only wants to see aten operators."""

without_overrides: Any = torch._C.DisableTorchFunctionSubclass
"""Within it torch does not look for a subclass's `__torch_function__`, so reading an attribute takes half the time."""

make_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""A tensor of a class with a shape and no storage: (class, size, strides, storage offset, memory format, dtype, layout,
device, pin memory, requires grad, ...)."""

BOUND_FUNCTIONS = frozenset(
    [
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "abs", "add",
        "addmm", "baddbmm", "bmm", "cat", "clone", "cos", "div", "exp", "log", "mean", "mm", "mul",
        "native_layer_norm", "neg", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "stack", "sub", "sum", "t",
        "tanh", "transpose", "unsqueeze", "where", "zeros_like",
    ]
)  # fmt: skip
BOUND_METHODS = frozenset(["add_", "copy_", "detach", "div_", "expand", "mul_", "permute", "sub_", "view", "zero_"])
BOUND_LINALG = frozenset(["linalg_vector_norm"])
"""Operators whose Python function or method in torch has the same name and the same arguments."""


@cache
def binding_of(op: OpOverload) -> Callable[..., Any]:
    """The fastest way to call `op` from Python: a generated binding parses arguments in half the time of a schema's
    call.

    `op` itself if no binding is known to be the same.
    """
    if op.namespace == "aten" and op._overloadname != "out":
        name = op._schema.name.partition("::")[2]
        if name in BOUND_FUNCTIONS or name.startswith(("_foreach_", "_fused_adam")):
            return cast(Callable[..., Any], getattr(torch._C._VariableFunctions, name, op))
        if name in BOUND_METHODS:
            return cast(Callable[..., Any], getattr(torch._C.TensorBase, name))
        if name in BOUND_LINALG:
            linalg: Any = torch._C  # the stubs leave the module out
            return cast(Callable[..., Any], getattr(linalg._linalg, name))
    return op


handle_of: Callable[[OpOverload], object] = attrgetter("_op")
"""Stands for an operator in keys: the hash of an OpOverload is a Python function, which calls the hash of this
object."""


def change_wrapper(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let `op`, such as `squeeze_`, change the shape that the wrapper `args[0]` shows, and nothing else."""
    with torch._C._DisableTorchDispatch():
        op(*args, **kwargs)


def use_foreach_for(cls: type[torch.Tensor]) -> None:
    """Let torch.optim and torch.nn.utils choose their foreach and fused implementations for tensors of class `cls`."""
    for supported in (torch_optimizer._foreach_supported_types, torch_foreach._foreach_supported_types):
        if cls not in supported:
            supported.append(cls)


def is_called_by_autograd() -> bool:
    """True when the operator being dispatched is called by the formula of a gradient, not by a hook or other function.

    To be called below a `__torch_dispatch__`, also for calls of a formula that a kernel of ours has caught and
    repeated.
    """
    if torch._C._current_autograd_node() is None:
        return False
    frame = sys._getframe(1)
    while frame.f_code.co_name != "__torch_dispatch__" and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_back
    while caller and caller.f_globals["__name__"] in (__name__, "disttrain.dtensor.gradients.zeros", "torch._ops"):
        caller = caller.f_back
    # For a GPU the engine has a thread of its own, which has no Python frame.
    return caller is None or caller.f_code is graph._engine_run_backward.__code__


def backward_number() -> int:
    """A unique number of the backward pass that this thread runs; -1 if it runs none."""
    return torch._C._current_graph_task_id()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` once when the current backward pass has ended; if that pass fails, `callback` is dropped."""
    Variable._execution_engine.queue_callback(callback)


def is_traced() -> bool:
    """True while operators are recorded, for example by a compiler, and not only run."""
    return bool(torch._C._len_torch_dispatch_stack())


@contextmanager
def off_the_record(*, with_symbols: bool = False) -> Iterator[None]:
    """Within it nothing is recorded; `with_symbols` new tensors may have sizes that are the compiler's symbols."""
    if not is_traced():
        yield
        return
    fake_mode = detect_fake_mode() if with_symbols else None
    with _python_dispatch._disable_current_modes():
        if fake_mode is None:
            yield
        else:
            with fake_mode:
                yield


def is_kept_for_later() -> bool:
    """True when a `__tensor_flatten__` is asked by AOTAutograd, which will make a graph's results by what it says."""
    return sys._getframe(2).f_code.co_name == "create_subclass_metadata"


def put_on_record(tensors: Sequence[torch.Tensor], numbers: Iterable[Any]) -> None:
    """Tells the recorder the sizes of tensors that were made while it did not record, expressed by sizes it knows
    (`numbers`) where possible.

    Otherwise the recorder would take an unknown size from any input that has it: in forward, say, from a gradient.
    """
    if not is_traced():
        return
    # Loaded by whoever records.
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return
    tracer: Any = mode.tracer
    by_expression = {
        number.node.expr: number
        for number in numbers
        if isinstance(number, torch.SymInt) and number in tracer.symnode_tracker
    }
    for tensor in tensors:
        for number in (*tensor.shape, *tensor.stride()):
            if isinstance(number, torch.SymInt) and number.node.is_symbolic():
                same = _computed_again(number.node.expr, by_expression, tracer)
                if isinstance(same, torch.SymInt):
                    proxy_tensor.set_proxy_slot(number, tracer, proxy_tensor.get_proxy_slot(same, tracer))


def _computed_again(expression: Any, by_expression: dict[Any, Any], tracer: Any) -> Any:
    """A number of which it is recorded how `expression` comes of the known ones."""
    # Loaded by whoever records.
    from torch.utils._sympy.interp import sympy_interp

    # And this one.
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    if expression in by_expression:
        return by_expression[expression]
    symbols = {
        symbol: by_expression[symbol] if symbol in by_expression else tracer.sympy_expr_tracker[symbol].value
        for symbol in expression.free_symbols
    }
    return sympy_interp(PythonReferenceAnalysis, symbols, expression)


def hint_of(number: int | torch.SymInt) -> int:
    """The value that a symbol had when tracing began: for decisions, not for computations."""
    return number if isinstance(number, int) else cast(int, number.node.hint)


_Function = TypeVar("_Function", bound=Callable[..., Any])
_ONE_CALLS: list[Callable[..., Any]] = []


def as_one_call(function: _Function) -> _Function:
    """`function`, which Dynamo puts into its graph as one call, in place of reading it."""
    _ONE_CALLS.append(function)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _tell_dynamo()
        return function(*args, **kwargs)

    return cast(_Function, called)


def _tell_dynamo() -> None:
    for function in _ONE_CALLS:
        torch.compiler.allow_in_graph(function)


# To register it earlier would load Dynamo, which takes as long as torch itself. Dynamo calls a function with this mark
# at once, and traces the code around it.
_tell_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_caching(reason: str) -> NoReturn:
    """Keeps AOTAutograd, which asks for the key of an input, from looking for its results in the cache on disk."""
    # Loaded by whoever asks.
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    raise BypassAOTAutogradCache(reason)


def catch_operator(op: OpOverload, kernel: Callable[..., Any]) -> None:
    """Registers `kernel(op, ...)` for the composed operator `op` on all tensor subclasses; the kernel may call
    `composed` for torch's own way."""
    _ATEN.impl(op.name().removeprefix("aten::"), partial(kernel, op), "PythonTLSSnapshot")


def composed(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`op` by other operators, as torch composes it: in Python, where it has a way to, while the compiler traces."""
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher):
        return op.decompose(*args, **kwargs)
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def composed_in_inference(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Decomposes `op`, for a call that was not decomposed, as happens where autograd is off.

    torch counts the writes and tracks the views of the parts as if they had been called separately, unless it does so
    for `op`.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return composed(op, *args, **kwargs)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return composed(op, *args, **kwargs)


def above_autograd(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The results of `op` as if it had not been caught."""

    def call() -> list[torch.Tensor]:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)):
            results = op(*args, **kwargs)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    _UNCAUGHT[id(call)] = call
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return tuple(torch.ops.disttrain.above_autograd.default(tensors, id(call)))


def is_transformed() -> bool:
    """True within `torch.func.grad` and its like, and where derivatives are computed forward."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# What is registered holds as long as these do.
_ATEN: Final = torch.library.Library("aten", "IMPL")
_OWN: Final = torch.library.Library("disttrain", "FRAGMENT")
# torch 2.11 passes a call on to a subclass only through the kernel that our registration replaces; so this one does the
# same.
_OWN.define("above_autograd(Tensor[] given, int call) -> Tensor[]")
_UNCAUGHT: Final[dict[int, Callable[[], list[torch.Tensor]]]] = {}
_OWN.impl("above_autograd", lambda _, call: _UNCAUGHT.pop(call)(), "CompositeImplicitAutograd")
_OWN.impl("above_autograd", lambda _, call: _UNCAUGHT.pop(call)(), "Python")


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give wrapper `tensor` the shape and dtype of wrapper `other`."""
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]


def are_counted_together(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True where one version counter counts the writes to both, as for a tensor and its views."""
    version = tensor._version
    if other._version != version:
        return False
    set_versions: Any = torch._C._autograd._unsafe_set_version_counter
    set_versions((tensor,), (version + 1,))
    try:
        return other._version != version
    finally:
        set_versions((tensor,), (version,))


@dataclass(frozen=True)
class OpFacts:
    """The facts that an operator's schema states.

    `name` is such as `aten.add_` (no overload); `arguments` are the positional parameters' names; `mutated` are the
    positions of arguments that it writes to, `-1` for keyword-only ones, and `written` their names; a view's result
    shares memory with its first argument; `is_composed` when torch computes it by other operators; `changes_shape` when
    it makes a view of its argument and leaves that in its place; `returned` are, per result, the position of the
    argument that it is, None for a new tensor; `returns_list` when it is a list of tensors; `returns_data` when the
    result is no tensor but values; `shape_depends_on_values` as of `nonzero`.
    """

    name: str
    arguments: tuple[str, ...]
    mutated: tuple[int, ...]
    written: tuple[str, ...]
    returned: tuple[int | None, ...]
    is_pointwise: bool
    is_random: bool
    is_view: bool
    is_composed: bool
    changes_shape: bool
    returns_data: bool
    returns_list: bool
    shape_depends_on_values: bool

    @property
    def is_inplace(self) -> bool:
        return self.mutated == (0,)


_UNDECLARED_WRITES = {
    f"aten.{name}": ("running_mean", "running_var")
    for name in ("cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm")
}
"""Arguments that an operator writes to, though its schema does not say so."""


def facts_of(op: OpOverload) -> OpFacts:
    """The facts of `op`, for the rules to look at; to be asked once per operator."""
    schema = op._schema
    positions = [-1 if argument.kwarg_only else index for index, argument in enumerate(schema.arguments)]
    name = f"{op.namespace}.{op._schema.name.partition('::')[2]}"
    undeclared = _UNDECLARED_WRITES.get(name, ())
    writes = [
        argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
        for argument in schema.arguments
    ]
    mutated = tuple(position for position, is_write in zip(positions, writes, strict=True) if is_write)
    written = {
        _alias_of(argument): position
        for position, argument, is_write in zip(positions, schema.arguments, writes, strict=True)
        if is_write and argument.alias_info is not None
    }
    returns_data = torch.Tag.data_dependent_output in op.tags
    return OpFacts(
        name=name,
        arguments=tuple(argument.name for argument in schema.arguments),
        mutated=mutated,
        written=tuple(argument.name for argument, is_write in zip(schema.arguments, writes, strict=True) if is_write),
        returned=tuple(written.get(_alias_of(value)) for value in schema.returns),
        is_pointwise=torch.Tag.pointwise in op.tags and not returns_data,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_composed=torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"),
        is_view=not mutated and ("unsafe_split" in name or any(value.alias_info for value in schema.returns)),
        changes_shape=torch.Tag.inplace_view in op.tags,
        returns_data=returns_data,
        returns_list=len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType),
        # Indexing by masks alone depends on values, and finds no result without them.
        shape_depends_on_values=torch.Tag.dynamic_output_shape in op.tags and op._schema.name != "aten::index",
    )


def same_without_writing(op: OpOverload) -> OpOverload | None:
    """The overload with the same arguments but `out`, or of the operator without underscore, which writes to none."""

    def arguments_of(each: OpOverload) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in each._schema.arguments if argument.name != "out"]

    packet: Any = getattr(torch.ops.aten, op._schema.name.partition("::")[2].removesuffix("_"), op.overloadpacket)
    others = (getattr(packet, name) for name in packet.overloads())
    return next(
        (
            other
            for other in others
            if other is not op
            and arguments_of(other) == arguments_of(op)
            and not any(argument.alias_info for argument in other._schema.arguments)
        ),
        None,
    )


def _alias_of(value: Any) -> frozenset[str] | None:
    """The alias set that a schema gives an argument or a result."""
    return None if value.alias_info is None else frozenset(value.alias_info.before_set)
