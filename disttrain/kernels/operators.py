"""Registers kernels as operators, under `torch.ops.disttrain`, so that nothing breaks a graph.

A graph that is traced for Inductor holds an operator's own launches and allocations in its place where `run` is said to
be traceable: calling an operator in Python from compiled code takes the host ten times as long as the launches. Other
graphs hold the operator as one call.

They have no second derivatives: differentiating a backward operator raises. Nor have they forward derivatives, of which
torch would give zeros: that raises too, but for what `call` calls of arguments that have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.kernels._torch import is_forward_mode, is_transformed, trace_in_place_of
from disttrain.settings import KERNELS

_LIBRARY: Final = torch.library.Library("disttrain", "FRAGMENT")

_FORMULAS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {}
"""Of operators with derivatives by name, what keeps their inputs, and their backward."""

_BATCHES: Final[dict[str, Callable[..., Any]]] = {}
"""Of operators that take batches by name, what torch.vmap calls."""

_RUNS: Final[dict[str, Callable[..., Any]]] = {}
"""What operators run, by name."""

_TRACEABLE: Final[list[tuple[Any, Callable[..., Any], bool]]] = []
"""Operators, what they run, and whether once for equal arguments, that no compiler has been told of yet."""


def define(
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    is_traceable: bool = False,
    is_once: bool = False,
) -> Any:
    """The operator of `schema`, that computes by `run` on every device; `shapes` tells a compiler what comes out.

    Args: is_traceable  on GPUs `run` consists of torch's operators and of kernels launched by `traced`, and looks at
                        nothing but shapes;  is_once  a graph may have it once for equal arguments, since nobody
                        writes to the results.
    """
    name = schema.partition("(")[0]
    full_name = f"disttrain::{name}"

    def checked(*args: Any) -> Any:
        if is_forward_mode() and full_name in _FORMULAS:
            # Its arguments' own derivatives are not seen here.
            raise _no_forward(full_name)
        return run(*args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    _RUNS[full_name] = run

    def fake(*args: Any) -> Any:
        _tell_compilers()
        return shapes(*args)

    torch.library.register_fake(full_name, fake, lib=_LIBRARY)
    op = getattr(torch.ops.disttrain, name).default
    if is_traceable:
        _TRACEABLE.append((op, run, is_once))
    return op


def _tell_compilers() -> None:
    """Registers what is traceable once somebody traces: before, torch's modules for it would be loaded for nothing."""
    while _TRACEABLE:
        op, run, is_once = _TRACEABLE.pop()
        trace_in_place_of(op, run, _is_seen, _LIBRARY, is_once=is_once)


def _is_seen(args: tuple[Any, ...]) -> bool:
    """True if kernels run for these arguments of an operator, which torch's own operators would not fuse better."""
    return args[0].is_cuda and KERNELS.read() != "reference"


def differentiate(
    op: Any,
    keep: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., Any],
    *,
    is_repeatable: bool = False,
) -> None:
    """Let autograd call `backward` with what `keep` has put into the context (see torch.library.register_autograd).

    `is_repeatable`: `backward` may be differentiated itself.
    """
    _FORMULAS[_name(op)] = keep, backward if is_repeatable else once(_name(op))(backward)
    torch.library.register_autograd(_name(op), backward, setup_context=keep, lib=_LIBRARY)


def refuse_second_derivative(op: Any) -> None:
    """Makes the results of `op`, a backward, raise when they are differentiated."""

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_second(_name(op))

    differentiate(op, keep, backward)


def call(op: Any, *args: Any) -> Any:
    """The result of an operator with derivatives, also within torch.func.grad and its like, which know no formula that
    is registered with an operator."""
    if torch.compiler.is_compiling() or not is_transformed():
        return op(*args)
    return _function_of(_name(op)).apply(*args)


@functools.cache
def _function_of(name: str) -> Any:
    keep, backward = _FORMULAS[name]

    def jvp(*_: Any) -> Any:
        raise _no_forward(name)

    methods = {"forward": _RUNS[name], "setup_context": keep, "backward": backward, "jvp": jvp}
    if name in _BATCHES:
        methods["vmap"] = _BATCHES[name]
    return type(name, (torch.autograd.Function,), {key: staticmethod(value) for key, value in methods.items()})


def once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has what the backward of a torch.autograd.Function gives raise when it is differentiated, as those of operators
    do; `name` is the operation's."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            # Whatever a gradient is differentiated by, also where those that came to it are constants.
            saved = ctx.saved_tensors if is_transformed() else (torch.empty(0, requires_grad=True),)
            return tuple(result if result is None else _second(name, result, *grads, *saved) for result in results)

        return run

    return decorate


class _Second(torch.autograd.Function):
    """A gradient that came of others."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, result: torch.Tensor, *others: Any) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _no_second(f"The backward of {ctx.name}")


_second: Final[Any] = _Second.apply


def refuse_transforms(name: str) -> None:
    """Raise where a transform of torch.func is at work, for what is no operator with `call`."""
    if not torch.compiler.is_compiling() and is_transformed():
        problem = f"{name} does not go through transforms of torch.func, such as grad and vmap."
        raise NotImplementedError(f"{problem} Use torch.autograd.grad, or torch's own operators.")


def _no_second(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is not differentiable. Use torch's own operators for second derivatives.")


def _no_forward(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no forward derivative. Use torch.func.vjp or grad, or torch's own operators."
    )


def batch(op: Any, num_tensors: int) -> None:
    """Let torch.vmap give `op`, which takes any dims before its own, a batch as one more of them.

    So it does where only some of the first `num_tensors` arguments have a batch dim; else it goes one by one.
    """

    def run(compute: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        size: int = info.batch_size
        if any(dim is not None for dim in in_dims[num_tensors:]):
            each = [
                _as_tuple(
                    compute(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)))
                )
                for i in range(size)
            ]
            results = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        else:
            moved = [
                tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
                for tensor, dim in zip(arguments[:num_tensors], in_dims, strict=False)
            ]
            results = _as_tuple(compute(*moved, *arguments[num_tensors:]))
        return (results, (0,) * len(results)) if len(results) > 1 else (results[0], 0)

    # The transforms around torch.vmap may be of others, which know no formula of the operator's.
    _BATCHES[_name(op)] = functools.partial(run, functools.partial(call, op))
    torch.library.register_vmap(_name(op), functools.partial(run, op), lib=_LIBRARY)


def reshaped(result: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The result of an operator in another shape; autograd lets nobody write to it were it a view."""
    return torch.ops.aten._unsafe_view.default(result, shape)  # type: ignore[no-any-return]


def _as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _name(op: Any) -> str:
    name: str = op._schema.name
    return name
