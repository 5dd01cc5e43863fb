"""The one door to what torch keeps private about tensor subclasses, operator schemas and optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "OpFacts",
    "OpOverload",
    "facts_of",
    "make_wrapper",
    "no_torch_function",
    "tree_flatten",
    "tree_unflatten",
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


@dataclass(frozen=True)
class OpFacts:
    """What an operator's schema says of it.

    `name` is such as `aten.add_` (no overload); `arguments` are the positional parameters' names; `mutated` are the
    positions of arguments that it writes to, `-1` for keyword-only ones; a view's result shares memory with its first
    argument; `returned` are, per result, the position of the argument that it is, None for a new tensor;
    `returns_data` when the result is no tensor but values; `shape_depends_on_values` as of `nonzero`.
    """

    name: str
    arguments: tuple[str, ...]
    mutated: tuple[int, ...]
    returned: tuple[int | None, ...]
    is_pointwise: bool
    is_random: bool
    is_view: bool
    returns_data: bool
    shape_depends_on_values: bool

    @property
    def is_inplace(self) -> bool:
        return self.mutated == (0,)


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
    return OpFacts(
        name=f"{op.namespace}.{op._schema.name.partition('::')[2]}",
        arguments=tuple(argument.name for argument in schema.arguments),
        mutated=mutated,
        returned=tuple(written.get(_alias_of(value)) for value in schema.returns),
        is_pointwise=torch.Tag.pointwise in op.tags and not returns_data,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_view=not mutated and any(value.alias_info is not None for value in schema.returns),
        returns_data=returns_data,
        # Indexing by masks alone depends on values, and finds no result without them.
        shape_depends_on_values=torch.Tag.dynamic_output_shape in op.tags and op._schema.name != "aten::index",
    )


def _alias_of(value: Any) -> frozenset[str] | None:
    """The alias set that a schema gives an argument or a result."""
    return None if value.alias_info is None else frozenset(value.alias_info.before_set)
