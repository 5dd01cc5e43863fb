"""Carries out the machine's commands, on memory, streams, and by collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, cast

from torch.profiler import record_function

from disttrain.fsdp2.machine import commands as do
from disttrain.fsdp2.machine.group import Group
from disttrain.fsdp2.machine.unit import gather_anew
from disttrain.fsdp2.modules.functional_call import take_up
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.transfers.comm import Comm, Named, Receiver
from disttrain.fsdp2.transfers.gathering import start_gathering
from disttrain.fsdp2.transfers.reducing import reduce_together
from disttrain.process_group._torch import profiler


def run(commands: do.Commands, comm: Comm | None = None) -> None:
    """Carry out each command before the next one is asked for. `comm` is that of the root, once there is one."""
    if profiler._is_profiler_enabled:
        for command in commands:
            with _shown_in_traces(command, comm):
                _HANDLERS[type(command)](command, comm)
        return
    for command in commands:
        _HANDLERS[type(command)](command, comm)


_memory: Callable[[Group], ParamGroup] = cast(Any, attrgetter("facts"))
"""The parameters that a group of the machine represents."""


def _gather(command: do.Gather, _: object) -> None:
    needed = _memory(command.needed)
    with Named(needed):
        start_gathering([_memory(group) for group in command.groups], needed.own_comm())


def _show(command: do.Show, _: object) -> None:
    group = _memory(command.group)
    others = group.show()
    if others and not take_up(group, others):
        run(gather_anew(group.state))


def _reduce(command: do.Reduce, _: object) -> None:
    parts = [(_memory(group), cast(list[ShardedParam], params)) for group, params in command.parts]
    with nullcontext() if command.named is None else Named(_memory(command.named)):
        reduce_together(parts, command.scale)


def _finish(command: do.Finish, comm: Comm) -> None:
    if not command.if_partial or any(not each.is_complete for each in comm.reducing):
        with nullcontext() if command.named is None else Named(_memory(command.named)):
            comm.finish_reductions(but_last_sum=command.but_last_sum)


def _settle(command: do.Settle, comm: Comm) -> None:
    comm.finish_offload()
    comm.several_grads.call_hooks()
    comm.release_gathered()
    for group in command.groups:
        _memory(group).drop_cast()


_HANDLERS: dict[type[do.Command], Callable[[Any, Any], None]] = {
    do.Gather: _gather,
    do.Wait: lambda command, _: _memory(command.group).finish_gathering(),
    do.Show: _show,
    do.Hide: lambda command, _: _memory(command.group).hide(),
    do.Free: lambda command, _: _memory(command.group).free(command.keep_on),
    do.DropPart: lambda command, _: _memory(command.group).drop_part(),
    do.KeepGrads: lambda command, _: _memory(command.group).keep_grads(),
    do.DropGrads: lambda command, _: _memory(command.group).drop_grads(),
    do.Reduce: _reduce,
    do.Finish: _finish,
    do.Settle: _settle,
    do.FinishUpload: lambda _, comm: comm.finish_upload(),
    do.DropReductions: lambda _, comm: comm.drop_reductions(),
}


def _shown_in_traces(command: do.Command, comm: Comm | None) -> AbstractContextManager[object]:
    """The range in traces of a command that may take time, by the modules whose parameters it is about."""
    text, groups = "", []
    match command:
        case do.Gather():
            text, groups = "gather", [_memory(group) for group in command.groups]
        case do.Wait() if _memory(command.group).gathering is not None:
            text, groups = "wait for gather", [_memory(command.group)]
        case do.Free():
            text, groups = "free", [_memory(command.group)]
        case do.Reduce():
            text, groups = "reduce", [_memory(group) for group, _ in command.parts]
        case do.Finish() if comm is not None and comm.reducing:
            return record_function(f"fully_shard wait for reduce {_paths(part.group for part in comm.reducing)}")
    return record_function(f"fully_shard {text} {_paths(groups)}") if text else nullcontext()


def _paths(groups: Iterable[Receiver]) -> str:
    """Of modules, each once: parameters of several dtypes are several groups of one."""
    return ", ".join(dict.fromkeys(group.module_path for group in groups))
