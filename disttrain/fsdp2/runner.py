"""Carries out what the machine asks for: on memory, by collectives, on streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from disttrain.fsdp2.comm import Comm, Named
from disttrain.fsdp2.given import take_up
from disttrain.fsdp2.machine.commands import (
    Command,
    Commands,
    DropGrads,
    DropPart,
    DropReductions,
    Finish,
    FinishPartial,
    FinishUpload,
    Free,
    Gather,
    Hide,
    KeepGrads,
    Reduce,
    Settle,
    Show,
    Wait,
)
from disttrain.fsdp2.machine.group import Group
from disttrain.fsdp2.machine.unit import gather_anew
from disttrain.fsdp2.param import ShardedParam
from disttrain.fsdp2.param_group import ParamGroup
from disttrain.fsdp2.transfers.gathering import start_gathering
from disttrain.fsdp2.transfers.reducing import reduce_together


def run(commands: Commands, comm: Comm | None = None) -> None:
    """Carry out each command before the next one is asked for. `comm` is that of the root, where there is one."""
    for command in commands:
        _HANDLERS[type(command)](command, comm)


def memory_of(group: Group) -> ParamGroup:
    """What a group of the machine stands for."""
    return cast(ParamGroup, group.facts)


def _gather(command: Gather, _: Comm | None) -> None:
    needed = memory_of(command.needed)
    with Named(needed):
        start_gathering([memory_of(group) for group in command.groups], needed.own_comm())


def _wait(command: Wait, _: Comm | None) -> None:
    gathering = memory_of(command.group).gathering
    assert gathering is not None
    gathering.finish()


def _show(command: Show, _: Comm | None) -> None:
    group = memory_of(command.group)
    others = group.show()
    if others and not take_up(group, others, group.device):
        run(gather_anew(group.state))


def _hide(command: Hide, _: Comm | None) -> None:
    memory_of(command.group).hide()


def _free(command: Free, _: Comm | None) -> None:
    memory_of(command.group).free(command.keep_on)


def _drop_part(command: DropPart, _: Comm | None) -> None:
    memory_of(command.group).drop_part()


def _keep_grads(command: KeepGrads, _: Comm | None) -> None:
    memory_of(command.group).keep_grads()


def _drop_grads(command: DropGrads, _: Comm | None) -> None:
    memory_of(command.group).drop_grads()


def _reduce(command: Reduce, _: Comm | None) -> None:
    parts = [(memory_of(group), cast(list[ShardedParam], params)) for group, params in command.parts]
    with _named(command.named):
        reduce_together(parts, command.scale)


def _finish(command: Finish, comm: Comm | None) -> None:
    assert comm is not None
    with _named(command.named):
        comm.finish_reductions(but_last_sum=command.but_last_sum)


def _finish_partial(_: FinishPartial, comm: Comm | None) -> None:
    assert comm is not None
    if any(not each.is_complete for each in comm.reducing):
        comm.finish_reductions()


def _settle(command: Settle, comm: Comm | None) -> None:
    assert comm is not None
    comm.finish_offload()
    comm.several_grads.call_hooks()
    comm.release_gathered()
    for group in command.groups:
        memory_of(group).cast_shards = None


def _finish_upload(_: FinishUpload, comm: Comm | None) -> None:
    assert comm is not None
    comm.finish_upload()


def _drop_reductions(_: DropReductions, comm: Comm | None) -> None:
    assert comm is not None
    comm.drop_reductions()


def _named(group: Group | None) -> AbstractContextManager[object]:
    return nullcontext() if group is None else Named(memory_of(group))


_HANDLERS: dict[type[Command], Callable[[Any, Comm | None], None]] = {
    Gather: _gather,
    Wait: _wait,
    Show: _show,
    Hide: _hide,
    Free: _free,
    DropPart: _drop_part,
    KeepGrads: _keep_grads,
    DropGrads: _drop_grads,
    Reduce: _reduce,
    Finish: _finish,
    FinishPartial: _finish_partial,
    Settle: _settle,
    FinishUpload: _finish_upload,
    DropReductions: _drop_reductions,
}
