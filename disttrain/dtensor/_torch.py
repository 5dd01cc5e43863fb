"""The one door to what torch keeps private about tensor subclasses, operator schemas and optimizers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import graph
from torch.optim import optimizer as torch_optimizer

__all__ = [
    "OpFacts",
    "OpOverload",
    "become",
    "facts_of",
    "functional_twin",
    "is_called_by_autograd",
    "make_wrapper",
    "no_torch_function",
    "use_foreach_for",
]

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that only wants to see aten operators."""


make_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""A tensor of a class with a shape and no storage: (class, size, strides, storage offset, memory format, dtype, layout,
device, pin memory, requires grad, ...)."""


def use_foreach_for(cls: type[torch.Tensor]) -> None:
    """Let torch.optim choose its foreach and fused implementations for parameters of class `cls`."""
    supported = torch_optimizer._foreach_supported_types
    if cls not in supported:
        supported.append(cls)


def is_called_by_autograd(depth: int) -> bool:
    """True when the operator was called by the formula of a gradient, and not by a hook or a function of the user's.

    `depth` counts the frames from the caller's up to the one that torch entered.
    """
    if torch._C._current_autograd_node() is None:
        return False
    frame = sys._getframe(depth + 1).f_back
    # On a device the engine has a thread of its own, without a frame.
    return frame is None or frame.f_code is graph._engine_run_backward.__code__


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give wrapper `tensor` the shape and dtype of wrapper `other`."""
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]


def functional_twin(op: OpOverload) -> OpOverload | None:
    """The view that in-place view `op` makes, as an operator that returns it; None where no other operator does."""
    twins = getattr(torch.ops.aten, op._schema.name.partition("::")[2].removesuffix("_"), None)
    wanted = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in [] if twins is None else twins.overloads():
        twin: OpOverload = getattr(twins, name)
        if [(argument.name, str(argument.type)) for argument in twin._schema.arguments] == wanted:
            return twin if facts_of(twin).is_view else None
    return None


@dataclass(frozen=True)
class OpFacts:
    """What an operator's schema says of it.

    `name` is such as `aten.add_` (no overload); `arguments` are the positional parameters' names; `mutated` are the
    positions of arguments that it writes to, `-1` for keyword-only ones, and `written` their names; a view's result
    shares memory with its first argument, and an in-place view makes its first argument such a view; `returned` are,
    per result, the position of the argument that it is, None for a new tensor; `returns_data` when the result is no
    tensor but values; `shape_depends_on_values` as of `nonzero`.
    """

    name: str
    arguments: tuple[str, ...]
    mutated: tuple[int, ...]
    written: tuple[str, ...]
    returned: tuple[int | None, ...]
    is_inplace_view: bool
    is_pointwise: bool
    is_random: bool
    is_view: bool
    returns_data: bool
    shape_depends_on_values: bool

    @property
    def is_inplace(self) -> bool:
        return self.mutated == (0,)


# Operators that write to what their schemas don't say that they write to.
_UNDECLARED = dict.fromkeys(
    ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm"), ("running_mean", "running_var")
)


def facts_of(op: OpOverload) -> OpFacts:
    """The facts of `op`, for the rules to look at; to be asked once per operator."""
    schema = op._schema
    positions = [-1 if argument.kwarg_only else place for place, argument in enumerate(schema.arguments)]
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    mutated = tuple(position for position, is_write in zip(positions, writes, strict=True) if is_write)
    written = {
        _alias_of(argument): position
        for position, argument, is_write in zip(positions, schema.arguments, writes, strict=True)
        if is_write
    }
    returns_data = torch.Tag.data_dependent_output in op.tags
    name = f"{op.namespace}.{op._schema.name.partition('::')[2]}"
    return OpFacts(
        name=name,
        arguments=tuple(argument.name for argument in schema.arguments),
        mutated=mutated,
        written=(
            *(argument.name for argument, is_write in zip(schema.arguments, writes, strict=True) if is_write),
            *_UNDECLARED.get(name, ()),
        ),
        returned=tuple(written.get(_alias_of(value)) for value in schema.returns),
        is_inplace_view=torch.Tag.inplace_view in op.tags,
        is_pointwise=torch.Tag.pointwise in op.tags and not returns_data,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_view=not mutated and any(value.alias_info is not None for value in schema.returns),
        returns_data=returns_data,
        shape_depends_on_values=torch.Tag.dynamic_output_shape in op.tags,
    )


def _alias_of(value: Any) -> frozenset[str] | None:
    """The alias set that a schema gives an argument or a result."""
    return None if value.alias_info is None else frozenset(value.alias_info.before_set)
