"""Records what `fully_shard` does on a rank, in order: gathers, waits, frees, reductions, what modules are shown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from disttrain.fsdp2.modules.parameter_swap import Shown
from disttrain.fsdp2.params import extensions
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.params.unsharded import UnshardedParams
from disttrain.fsdp2.transfers import gathering, reducing
from disttrain.fsdp2.transfers.collectives import Gather, Reduction
from disttrain.fsdp2.transfers.comm import Comm


class Commands:
    """The lines of each thread, which is a rank."""

    def __init__(self) -> None:
        self._of_thread: dict[int, list[str]] = {}
        self._names: dict[int, str] = {}

    @property
    def lines(self) -> list[str]:
        return self._of_thread.setdefault(threading.get_ident(), [])

    def name(self, model: nn.Module) -> None:
        """Parameters of the model are called by the paths of their modules from now on."""
        self._names |= {id(module): path for path, module in model.named_modules()}

    def say(self, what: str, subject: object = "") -> None:
        self.lines.append(f"{what} {subject}".strip())

    def name_of(self, params: list[ShardedParam]) -> str:
        owner = params[0].owners[0]
        path = self._names.get(id(owner.module))
        return params[0].fqn if path is None else f"{path}.{owner.name}".lstrip(".")

    def started(self, what: str, function: Callable[..., Any], number: int) -> Callable[..., Any]:
        """A function that starts a collective, whose argument `number` is a list of what it takes."""

        def start(*arguments: Any) -> Any:
            group = next(each for each in reversed(arguments) if hasattr(each, "group") or hasattr(each, "world"))
            world = getattr(group, "group", group).world
            given = arguments[number]
            numel = given.numel() if hasattr(given, "numel") else sum(each.numel() for each in given)
            label = f"{world.module or '-'} ({numel})"
            self.say(what, label)
            result = function(*arguments)
            result.label = label
            return result

        return start

    def before(self, what: str, method: Callable[..., Any], name: Callable[[Any], str | None]) -> Callable[..., Any]:
        """A method that says what it does, unless its object has no name."""

        def call(own: Any, *arguments: Any, **options: Any) -> Any:
            subject = name(own)
            if subject is not None:
                self.say(what, subject)
            return method(own, *arguments, **options)

        return call


@contextmanager
def commands() -> Iterator[Commands]:
    """What is done within."""
    record = Commands()

    def label(own: Any) -> str | None:
        return getattr(own, "label", None)

    def of_unsharded(unsharded: Any) -> str:
        if isinstance(unsharded, extensions._GatheredParts):
            return f"{len(unsharded.parameters)} parameters with hooks"
        return record.name_of(unsharded._params)

    def of_shown(shown: Shown) -> str:
        return record.name_of(list(shown._params))

    def of_comm(comm: Comm) -> str | None:
        return None if comm.copied_out is None else ""

    replaced = [
        (gathering, "start_gather", record.started("gather", gathering.start_gather, 0)),
        (gathering, "start_gather_in_place", record.started("gather", gathering.start_gather_in_place, 0)),
        (reducing, "start_reduction", record.started("reduce", reducing.start_reduction, 0)),
        (Gather, "wait", record.before("wait", Gather.wait, label)),
        (Reduction, "wait_for_scatter", record.before("scattered", Reduction.wait_for_scatter, label)),
        (Reduction, "wait", record.before("finish", Reduction.wait, label)),
        (Reduction, "drop", record.before("drop", Reduction.drop, label)),
        (Comm, "release_gathered", record.before("release", Comm.release_gathered, of_comm)),
        (UnshardedParams, "free", record.before("free", UnshardedParams.free, of_unsharded)),
        (extensions._GatheredParts, "free", record.before("free", extensions._GatheredParts.free, of_unsharded)),
        (UnshardedParams, "part_on", record.before("keep part", UnshardedParams.part_on, of_unsharded)),
        (Shown, "show", record.before("show", Shown.show, of_shown)),
        (Shown, "hide", record.before("hide", Shown.hide, of_shown)),
    ]
    patches = [patch.object(owner, name, new) for owner, name, new in replaced]
    for each in patches:
        each.start()
    try:
        yield record
    finally:
        for each in patches:
            each.stop()
