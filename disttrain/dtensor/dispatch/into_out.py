"""Operators that write their result to `out`, as torch's optimizers call them: `torch.maximum(a, b, out=a)`.

Where an element of the result depends on those at its place alone, it is computed as without `out`, by the rule that
there is for that, and copied there. Others gather their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from disttrain.dtensor._torch import OpOverload, facts_of, same_without_writing

_COPY = torch.ops.aten.copy_.default

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@cache
def without_out(op: OpOverload) -> OpOverload | None:
    """The operator that returns what this one writes to `out`; None where `out` may need other elements."""
    facts = facts_of(op)
    if not facts.is_pointwise or facts.is_random or facts.written != ("out",):
        return None
    return same_without_writing(op)


def into_out(
    dispatch: Callable[..., Any], op: OpOverload, otherwise: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Computes `op` by `dispatch` and copies the result to `out`; `otherwise` where torch would not just do that."""
    out = kwargs["out"]
    # A plain tensor gets the whole result.
    if not hasattr(out, "_spec"):
        return otherwise(args, kwargs)
    result = dispatch(op, args, {name: value for name, value in kwargs.items() if name != "out"})
    # To give `out` another size, and to refuse a dtype, are not ours.
    if result.shape != out.shape or not torch.can_cast(result.dtype, out.dtype):
        return otherwise(args, kwargs)
    dispatch(_COPY, (out, result), {})
    return out
