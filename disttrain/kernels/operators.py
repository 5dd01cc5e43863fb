"""Registers kernels as operators, under `torch.ops.disttrain`, so that nothing breaks a graph.

A graph that is traced for Inductor holds an operator's own launches and allocations in its place where `run` is said to
be traceable: calling an operator in Python from compiled code takes the host ten times as long as the launches. Other
graphs hold the operator as one call.

They have no second derivatives: differentiating a backward operator raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.kernels._torch import trace_in_place_of
from disttrain.settings import KERNELS

_LIBRARY: Final = torch.library.Library("disttrain", "FRAGMENT")


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
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")

    def fake(*args: Any) -> Any:
        _tell_compilers()
        return shapes(*args)

    torch.library.register_fake(f"disttrain::{name}", fake, lib=_LIBRARY)
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


def differentiate(op: Any, keep: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]) -> None:
    """Let autograd call `backward` with what `keep` has put into the context (see torch.library.register_autograd)."""
    torch.library.register_autograd(_name(op), backward, setup_context=keep, lib=_LIBRARY)


def refuse_second_derivative(op: Any) -> None:
    """Makes the results of `op`, a backward, raise when they are differentiated."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_second(_name(op))

    torch.library.register_autograd(_name(op), backward, lib=_LIBRARY)


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
            return tuple(result if result is None else _Second.apply(name, result, *grads) for result in results)  # type: ignore[no-untyped-call]

        return run

    return decorate


class _Second(torch.autograd.Function):
    """A gradient that came of others."""

    @staticmethod
    def forward(ctx: Any, name: str, result: torch.Tensor, *grads: Any) -> torch.Tensor:
        ctx.name = name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _no_second(f"The backward of {ctx.name}")


def _no_second(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is not differentiable. Use torch's own operators for second derivatives.")


def batch(op: Any, num_tensors: int) -> None:
    """Let torch.vmap give `op`, which takes any dims before its own, a batch as one more of them.

    So it does where only some of the first `num_tensors` arguments have a batch dim; else it goes one by one.
    """

    def run(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        size: int = info.batch_size
        if any(dim is not None for dim in in_dims[num_tensors:]):
            each = [
                _as_tuple(op(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True))))
                for i in range(size)
            ]
            results = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        else:
            moved = [
                tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
                for tensor, dim in zip(arguments[:num_tensors], in_dims, strict=False)
            ]
            results = _as_tuple(op(*moved, *arguments[num_tensors:]))
        return (results, (0,) * len(results)) if len(results) > 1 else (results[0], 0)

    torch.library.register_vmap(_name(op), run, lib=_LIBRARY)


def reshaped(result: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The result of an operator in another shape; autograd lets nobody write to it were it a view."""
    return torch.ops.aten._unsafe_view.default(result, shape)  # type: ignore[no-any-return]


def _as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _name(op: Any) -> str:
    name: str = op._schema.name
    return name
