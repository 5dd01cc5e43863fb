"""The only file of `tp` that uses torch's private names, of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn


@contextmanager
def shown_as(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within, the module's own parameters of these names are plain tensors, which need not be parameters."""
    parameters = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(parameters)


def put_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Have the module's own parameters of these names be other tensors, in the order that they had."""
    module._parameters.update(tensors)  # type: ignore[arg-type]


def own_parameters(module: nn.Module, *names: str) -> list[nn.Parameter | None]:
    """The module's own parameters; quicker than by attribute."""
    return [module._parameters.get(name) for name in names]


def absent_children(module: nn.Module) -> list[str]:
    """Names of children that are registered, and None."""
    return [name for name, child in module._modules.items() if child is None]


def is_compiled(module: nn.Module) -> bool:
    """True where this module itself is compiled, with its hooks or without."""
    return module._compiled_call_impl is not None or "forward" in vars(module)


def graph_root() -> str:
    """The qualified name of the function that the graph begins with that Dynamo is making. Known to Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loaded by whoever makes a graph

    name: str = InstructionTranslator.current_tx().output.root_tx.f_code.co_qualname
    return name


# torch.compiler.assume_constant_result would load Dynamo.
graph_root._dynamo_marked_constant = True  # type: ignore[attr-defined]


def hook_before(module: nn.Module, hook: Callable[..., Any]) -> None:
    """A forward pre-hook, given arguments by name too. In modules that are alike it has the same name, unlike the
    numbers that torch gives, so that one graph of torch.compile serves them all."""
    name = _free_name(module._forward_pre_hooks)
    module._forward_pre_hooks[name] = hook  # type: ignore[index]  # any key will do
    module._forward_pre_hooks_with_kwargs[name] = True  # type: ignore[index]


def hooks_before(module: nn.Module) -> list[Callable[..., Any]]:
    """Its forward pre-hooks, whoever has made them."""
    return list(module._forward_pre_hooks.values())


def hook_after(module: nn.Module, hook: Callable[..., Any], *, always: bool = False) -> None:
    """A forward hook, as above; `always`: also when the forward has raised."""
    name = _free_name(module._forward_hooks)
    module._forward_hooks[name] = hook  # type: ignore[index]
    if always:
        module._forward_hooks_always_called[name] = True  # type: ignore[index]


def _free_name(hooks: Mapping[Any, object]) -> str:
    return next(name for name in map("tp{}".format, count()) if name not in hooks)


def saved_tensors_hooks() -> object:
    """The hooks on tensors that autograd saves now, such as activation checkpointing's; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def as_own(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: what an autograd function returns can be written to then."""
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if tensor._is_view() else tensor
    return result
