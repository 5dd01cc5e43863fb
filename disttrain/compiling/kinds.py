"""Finds the blocks of a model, and which of them one graph can serve."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from disttrain.errors import CompileError

Blocks = str | Sequence[str] | type[nn.Module] | Callable[[str, nn.Module], bool]
"""The modules that are blocks: patterns of paths (`layers.*`), a class, or what says so of a path and its module."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Kind:
    """Blocks that are alike: `paths` of modules whose class is called `name`."""

    name: str
    paths: tuple[str, ...]


def find_blocks(model: nn.Module, blocks: Blocks | None = None) -> dict[str, nn.Module]:
    """The model's blocks by path, in its order; none of them lies within another.

    Without `blocks`: of each outermost list of modules those that have modules themselves, and are not the only ones of
    their class there, whatever wraps them for activation checkpointing.
    Raises: CompileError when there are none.
    """
    result = dict(_repeated(model, "") if blocks is None else _chosen(model, blocks))
    if not result:
        rule = "no list of modules holds two of one class" if blocks is None else f"none is meant by blocks={blocks!r}"
        raise CompileError(
            "compile_blocks",
            f"{rule} in this {type(model).__name__}.",
            "Give blocks= patterns of their paths, such as 'layers.*', or their class.",
        )
    return result


def kinds_of(blocks: Mapping[str, nn.Module]) -> list[Kind]:
    """Sort blocks by what a graph depends on: classes, parameters and plain attributes of all modules within.

    An attribute that is another in each of three or more blocks of one structure is their number, and tells nothing.
    """
    alike: dict[Hashable, list[str]] = {}
    for path, block in blocks.items():
        alike.setdefault(_structure(block), []).append(path)
    kinds = []
    for paths in alike.values():
        of_each = [_attributes(blocks[path]) for path in paths]
        telling = [
            name for name in of_each[0] if len(paths) < 3 or len({values.get(name) for values in of_each}) < len(paths)
        ]
        by_values: dict[Hashable, list[str]] = {}
        for path, values in zip(paths, of_each, strict=True):
            by_values.setdefault(tuple(values.get(name) for name in telling), []).append(path)
        kinds += [Kind(type(unwrapped(blocks[same[0]])).__name__, tuple(same)) for same in by_values.values()]
    return kinds


def unwrapped(block: nn.Module) -> nn.Module:
    """The module within torch's wrapper for activation checkpointing; any other module itself."""
    inner = getattr(block, "_checkpoint_wrapped_module", None)
    return inner if isinstance(inner, nn.Module) else block


def meaning_of(forward: Any) -> Hashable:
    """Equal for forwards, which modules may have of their own, that one graph can serve.

    A function's code and what it names: torch.fx writes the same one anew for each module.
    """
    function = getattr(forward, "__func__", forward)
    if (
        not isinstance(function, FunctionType)
        or function.__closure__
        or function.__defaults__
        or function.__kwdefaults__
    ):
        return id(function)
    code, globals_ = function.__code__, function.__globals__
    named = tuple(id(globals_[name]) for name in code.co_names if name in globals_)
    return code.co_code, repr(code.co_consts), code.co_names, code.co_varnames, named, forward is function


def _repeated(module: nn.Module, path: str) -> Iterable[tuple[str, nn.Module]]:
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    classes = [type(unwrapped(child)) for _, child in children]
    is_list = isinstance(module, _LISTS)
    for (child_path, child), kind in zip(children, classes, strict=True):
        is_whole = kind.forward is not nn.Module.forward and any(True for _ in unwrapped(child).children())
        if is_list and is_whole and classes.count(kind) > 1:
            yield child_path, child
        else:
            yield from _repeated(child, child_path)


def _chosen(model: nn.Module, blocks: Blocks) -> Iterable[tuple[str, nn.Module]]:
    is_block = _says(blocks)
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside) and inside:
            continue
        if is_block(path, module):
            inside = (*inside, f"{path}." if path else "")
            yield path, module


def _says(blocks: Blocks) -> Callable[[str, nn.Module], bool]:
    if isinstance(blocks, type):
        kind = blocks
        return lambda _, module: isinstance(unwrapped(module), kind)
    if callable(blocks):
        return blocks
    patterns = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    return lambda path, _: path != "" and any(_matches(path, pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    """A `*` stands for one name, or a part of it."""
    names, parts = path.split("."), pattern.split(".")
    return len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))


def _structure(block: nn.Module) -> Hashable:
    modules = tuple(
        (path, type(module), meaning_of(vars(module).get("forward"))) for path, module in block.named_modules()
    )
    tensors = chain(block.named_parameters(), block.named_buffers())
    return modules, tuple((name, *_form(tensor)) for name, tensor in tensors)


def _form(tensor: Tensor) -> tuple[Hashable, ...]:
    layout = str(getattr(tensor, "placements", ""))
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, layout


def _attributes(block: nn.Module) -> dict[str, Any]:
    """Plain values of the modules within, by path and name."""
    return {
        f"{path}.{name}": value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and not name.startswith("__")
    }
