"""Repeats on the caller's lists, dicts and dataclasses what a module's forward does to its copies of them.

If a tensor in a container is cast, or passed through the function that notices the end of a backward, the module gets a
new container. When the module appends to it, as to a cache, the caller must find that in its own container.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.fsdp2.modules.pytrees import items_of


@dataclass(frozen=True, eq=False)
class Remade:
    """A container of the caller's, the one that the module got in its place, and what was in both then."""

    original: Any
    made: Any
    original_values: dict[Any, Any]
    made_values: dict[Any, Any]

    def hand_back(self) -> None:
        """Do to the caller's what the module has done to its own."""
        now = items_of(self.made)
        if now.keys() == self.made_values.keys() and all(now[key] is self.made_values[key] for key in now):
            return
        before = {id(value): self.original_values[key] for key, value in self.made_values.items()}
        values = {key: before.get(id(value), value) for key, value in now.items()}
        if isinstance(self.original, list):
            self.original[:] = values.values()
            return
        for key in self.original_values.keys() - values.keys():
            if isinstance(self.original, dict):
                del self.original[key]
        for key, value in values.items():
            if self.original_values.get(key, self) is value:
                continue
            if isinstance(self.original, dict):
                self.original[key] = value
            else:
                object.__setattr__(self.original, key, value)


class Forwards:
    """For each running forward of a module, the containers that it got in place of the caller's."""

    def __init__(self) -> None:
        self._under_way: list[list[Remade]] = []

    def __deepcopy__(self, _: object) -> Forwards:
        return Forwards()

    def note(self, arguments: Sequence[Any], taken: Sequence[Any]) -> None:
        """One begins, with `taken`, made of `original`: arguments, and those by name."""
        (args, kwargs), (own_args, own_kwargs) = arguments, taken
        changes = [*remade(args, own_args)]
        for name, value in own_kwargs.items() if kwargs is not own_kwargs else ():
            changes += remade(kwargs[name], value)
        self._under_way.append(changes)

    def end(self) -> None:
        """The last one that began is over."""
        for container in self._under_way.pop() if self._under_way else ():
            container.hand_back()

    def forget(self) -> None:
        """None is under way."""
        self._under_way.clear()


def remade(original: Any, made: Any) -> Iterator[Remade]:
    """Each container in the nest `original` that another one stands for in `made`."""
    if original is made or isinstance(original, torch.Tensor):
        return
    original_values, made_values = items_of(original), items_of(made)
    for key, value in original_values.items():
        yield from remade(value, made_values[key])
    if original_values and not isinstance(original, tuple):
        yield Remade(original, made, original_values, made_values)
