"""The things that a step works on besides its arguments: modules and optimizers, found in the function or named.

A recording holds as long as these are as they were when it was made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from disttrain.compiling._torch import (
    grads_of,
    hooks_of,
    num_handles,
    registers_of,
    versions_of,
    which_require_grad,
)
from disttrain.kernels.attention.context.current import state_of_block

_MAX_DEPTH = 4
_TRAINING: Final = attrgetter("training")
_ROOTS: Final = (nn.Module, Optimizer)
_KEEPERS: Final = (LRScheduler, torch.amp.GradScaler)
_LEAVES: Final = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Tensor, type, ModuleType))
"""What refers to nothing that is looked for."""
_END: Final = object()
"""Follows each list in one of several, so that none can be longer or shorter than it was."""


class State:
    """The state that a recording depends on: equal to another if nothing has changed. Its hash is kept."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self.parts == other.parts)


class Subjects:
    """The modules and optimizers of a step, and all their parameters.

    Args: roots  modules and optimizers; modules within modules belong to them.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.roots = roots
        modules = [root for root in roots if isinstance(root, nn.Module)]
        self.modules = list({id(child): child for module in modules for child in module.modules()}.values())
        self.optimizers = [root for root in roots if isinstance(root, Optimizer)]
        self.parameters = self._parameters()
        # What is asked at each replay is asked in few loops, that make no object for what they ask about.
        # Most are empty, and to ask whether one still is takes a third of the time of going through it.
        registers = [register for module in self.modules for register in registers_of(module)]
        self._registered = [register.values() for register in registers if register]
        self._no_registers = [register for register in registers if not register]
        self._hooks = [hooks for module in self.modules for hooks in hooks_of(module)]
        self._hooked, self._unhooked = (
            [each for each in self._hooks if each],
            [each for each in self._hooks if not each],
        )
        self._had = [*self._structure()]
        self._last: tuple[tuple[Any, ...], int, State] | None = None
        """The latest state: by what it was told, and the number of hooks that had been registered."""

    def _parameters(self) -> list[torch.Tensor]:
        of_modules = (parameter for module in self.modules for parameter in module.parameters(recurse=False))
        of_optimizers = (
            parameter for each in self.optimizers for group in each.param_groups for parameter in group["params"]
        )
        parameters = {id(each): each for each in (*of_modules, *of_optimizers)}
        return list(parameters.values())

    def holds(self, roots: Sequence[Any]) -> bool:
        """True if these are the roots, with the modules and parameters that they had."""
        if len(roots) != len(self.roots) or any(root is not old for root, old in zip(roots, self.roots, strict=True)):
            return False
        return not any(self._no_registers) and all(map(is_, self._structure(), self._had))

    def grads(self) -> list[torch.Tensor | None]:
        """The gradient of each parameter."""
        return grads_of(self.parameters)

    def state(self) -> State:
        """Equal to another as long as nothing has changed that a recording depends on; the same as the latest one, if
        it is equal to that."""
        parts = (
            [*map(_TRAINING, self.modules)],
            [*map(len, self._hooks if any(self._unhooked) else self._hooked)],
            which_require_grad(self.parameters),
            [_options(optimizer) for optimizer in self.optimizers],
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            state_of_block(),
        )
        handles = num_handles()
        if self._last is None or self._last[1] != handles or self._last[0] != parts:
            # A hook may have come in place of another one. Keys are never used again.
            keys = tuple(chain.from_iterable(self._hooks))
            # What the subjects hold keeps its identity.
            structure = tuple(map(id, self._had))
            lengths = tuple(map(len, self._hooks))
            told = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
            self._last = parts, handles, State((structure, keys, lengths, told[0], *told[2:]))
        return self._last[2]

    def prepare(self) -> None:
        """A recording begins: what earlier steps have computed ahead is not there at each replay."""
        for optimizer in self.optimizers:
            forget = getattr(optimizer, "forget_copies", None)
            if forget is not None:
                forget()

    def forget_recording(self) -> None:
        """A recording has failed: modules that gather parameters have not got them."""
        for module in self.modules:
            forget = getattr(module, "forget_recording", None)
            if forget is not None:
                forget()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that a step may write to, by names for people, without gradients."""
        named: dict[str, torch.Tensor] = {}
        modules = [root for root in self.roots if isinstance(root, nn.Module)]
        for index, root in enumerate(modules):
            # Two models, as teacher and student, have parameters of the same names.
            owner = f"module {index}'s " if len(modules) > 1 else ""
            named |= {f"{owner}parameter {name}": parameter for name, parameter in root.named_parameters()}
            named |= {f"{owner}buffer {name}": buffer for name, buffer in root.named_buffers()}
        for index, optimizer in enumerate(self.optimizers):
            for number, state in enumerate(optimizer.state.values()):
                tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
                named |= {f"optimizer {index}'s {key} of parameter {number}": value for key, value in tensors.items()}
        return named

    def versions(self) -> dict[torch.Tensor, int]:
        """The number of writes to each parameter and buffer, which torch counts."""
        buffers = [buffer for module in self.modules for buffer in module.buffers(recurse=False)]
        tensors = [*self.parameters, *buffers]
        return dict(zip(tensors, versions_of(tensors), strict=True))

    def _structure(self) -> Iterable[Any]:
        """The children, parameters and buffers of all modules, and the parameters of each group of the optimizers."""
        groups = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
        ended = chain.from_iterable((params, (_END,)) for params in groups)
        return chain(chain.from_iterable(self._registered), (_END,), chain.from_iterable(ended), (_END,))

    def obstacle(self) -> str:
        """Why a recording can't be begun or ended now, a whole sentence; empty where it can."""
        for module in self.modules:
            ask = getattr(module, "obstacle_to_capture", None)
            if ask is not None and (reason := ask()):
                return str(reason)
        for optimizer in self.optimizers:
            for name, value in chain.from_iterable(group.items() for group in optimizer.param_groups):
                if isinstance(value, torch.Tensor) and not value.is_cuda:
                    return f"{type(optimizer).__name__} has {name} as a tensor on {value.device}; move it to the GPU."
        return ""


def _options(optimizer: Optimizer) -> tuple[Any, ...]:
    """The numbers that a recording of the optimizer has in it; ours have none."""
    if hasattr(optimizer, "forget_copies"):
        return ()
    return tuple(
        (name, id(value) if isinstance(value, torch.Tensor) else repr(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    )


def roots_of(function: Callable[..., Any], more: Iterable[Any] = ()) -> list[Any]:
    """The modules and optimizers that `function` refers to: as a method's object or its attributes, in its closure, its
    globals, its defaults, in functions that it refers to; and `more`."""
    return list({id(root): root for root in (*more, *_referred(function, _MAX_DEPTH, set(), _ROOTS))}.values())


def keepers_of(function: Callable[..., Any]) -> list[Any]:
    """The LR schedulers and loss scalers that `function` refers to, also those within other schedulers."""
    return list(_referred(function, _MAX_DEPTH, set(), _KEEPERS))


def _referred(value: Any, depth: int, seen: set[int], kinds: tuple[type, ...]) -> Iterator[Any]:
    """The objects of these `kinds`; nothing is looked for within modules and optimizers."""
    if depth < 0 or type(value) in _LEAVES or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, kinds):
        yield value
    if isinstance(value, _ROOTS):
        return
    for each in _references(value):
        yield from _referred(each, depth - 1, seen, kinds)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Of a variable that is not assigned yet.
        return None


def _references(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        wrapped = getattr(value, "__wrapped__", None)
        # At each replay: inspect.getclosurevars reads the code's instructions.
        cells, all_globals = value.__closure__ or (), value.__globals__
        named = [all_globals[name] for name in value.__code__.co_names if name in all_globals]
        return [*map(_content, cells), *named, *(value.__defaults__ or ()), wrapped]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if inspect.ismodule(value) or inspect.isclass(value) or isinstance(value, torch.Tensor):
        return ()
    return getattr(value, "__dict__", {}).values()
