"""Registers kernels as operators, under `torch.ops.disttrain`: a graph holds each as one call, and nothing breaks it.

They have no second derivatives: differentiating a backward operator raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_LIBRARY: Final = torch.library.Library("disttrain", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """The operator of `schema`, that computes by `run` on every device; `shapes` tells a compiler what comes out."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"disttrain::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.disttrain, name).default


def differentiate(op: Any, keep: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]) -> None:
    """Let autograd call `backward` with what `keep` has put into the context (see torch.library.register_autograd)."""
    torch.library.register_autograd(_name(op), backward, setup_context=keep, lib=_LIBRARY)


def refuse_second_derivative(op: Any) -> None:
    """Makes the results of `op`, a backward, raise when they are differentiated."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{_name(op)} is not differentiable. Use torch's own operators for second derivatives."
        )

    torch.library.register_autograd(_name(op), backward, lib=_LIBRARY)


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
