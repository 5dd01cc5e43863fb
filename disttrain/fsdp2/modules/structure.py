"""Notices that a sharded model has been changed: modules or parameters added, replaced, moved, taken away.

Each rank would train a later parameter by itself, and a removed one would be gathered for nothing. Changes that concern
no parameter, such as another activation or a wrapper around a block, are accepted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

from torch import nn

from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import children_of, own_parameters, parameters_of

if TYPE_CHECKING:
    from disttrain.fsdp2.params.param_group import ParamGroup

STATE = "_disttrain_shard_state"
"""The attribute in which a sharded module keeps its state."""


class Structure:
    """The modules below `roots`, and the names of their parameters; asked before each step."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))
        children, parameters = [*map(children_of, modules)], [*map(parameters_of, modules)]
        self._children, self._parameters = [*filter(None, children)], [*filter(None, parameters)]
        self._empty = [names for names in (*children, *parameters) if not names]
        self._known = self._found()

    def _found(self) -> tuple[list[int], list[nn.Module | None], list[int], list[str]]:
        # All of it runs in C: some ten nanoseconds for each module.
        children, parameters = self._children, self._parameters
        return (
            [*map(len, children)],
            [*chain.from_iterable(map(dict.values, children))],
            [*map(len, parameters)],
            [*chain.from_iterable(parameters)],
        )

    def holds(self) -> bool:
        """False once a module has other children, or parameters of other names."""
        return not any(self._empty) and self._found() == self._known


def unmanaged_modules(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """The module and what is below it, each once, but for parts that are sharded already."""
    seen = set() if seen is None else seen
    seen.add(module)
    yield module
    for child in module.children():
        if STATE not in child.__dict__ and child not in seen:
            yield from unmanaged_modules(child, seen)


def check_parameters(
    modules: Sequence[nn.Module], groups: Sequence[ParamGroup], left_alone: Container[tuple[nn.Module, str]]
) -> None:
    """Raise ShardingError where modules that are sharded as `groups` have other parameters than these, and than what
    was `left_alone`."""
    # In the order of modules: all ranks name the same one.
    registered = {
        (child, name): None
        for module in modules
        for child in unmanaged_modules(module)
        for name, _ in own_parameters(child)
    }
    for param in (param for group in groups for param in group.params):
        for owner in param.owners:
            if (owner.module, owner.name) not in registered:
                _refuse(
                    modules,
                    groups,
                    f"parameter {param.fqn} is there no longer, or has been moved to another part of the model",
                )
            registered.pop((owner.module, owner.name), None)
    for child, name in (added for added in registered if added not in left_alone):
        paths = (path for module in modules for path, submodule in module.named_modules() if submodule is child)
        path = ".".join(part for part in (next(paths, ""), name) if part)
        _refuse(modules, groups, f"it has a new parameter {path}, which each rank would train by itself")


def _refuse(modules: Sequence[nn.Module], groups: Sequence[ParamGroup], problem: str) -> NoReturn:
    mesh = groups[0].sharding.mesh if groups else None
    raise ShardingError(
        "forward",
        f"this {type(modules[0]).__name__} has been changed since fully_shard: {problem}.",
        "Change the model first, and call fully_shard then; or assign a DTensor that lies as the parameter does.",
        rank=None if mesh is None else mesh.get_rank(),
    )


def name_groups(modules: Sequence[nn.Module]) -> None:
    """Name the groups of these modules and those below by their paths, for the flight recorder and for errors."""
    named = set()
    for path, module in chain.from_iterable(module.named_modules() for module in modules):
        state = module.__dict__.get(STATE)
        if state is not None and state not in named:
            named.add(state)
            for group in state.groups:
                group.module_path = path or type(module).__name__
