"""The one door: every collective of every layer passes `issue`, every message `issue_message`, where observers sit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from disttrain.errors import BackendError, DisttrainError, ShapeError
from disttrain.process_group._torch import profiler
from disttrain.process_group.calls.async_tensor import AsyncCollectiveTensor, settled
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.watching.fingerprint import compare_calls
from disttrain.process_group.watching.observer import Call, How
from disttrain.process_group.watching.ranges import COLLECTIVE, MESSAGE, shown_in_traces
from disttrain.process_group.work import CallArguments, TransportWork, Work

REFUSALS = (BackendError, ShapeError)
"""Errors that a backend raises itself, before its transport gets the call."""


def parts_of(received_rows: Sequence[int], sent_rows: Sequence[int]) -> How:
    """Of an all_to_all_single: None where all parts are equal."""
    first, size = sent_rows[0] if sent_rows else 0, len(sent_rows)
    if sent_rows.count(first) == size == received_rows.count(first):
        return None
    return tuple(received_rows), tuple(sent_rows)


def issue(
    group: ProcessGroup,
    operation: str,
    run: Callable[..., TransportWork],
    arguments: tuple[Any, ...],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    async_op: bool,
    peer_rank: int | None = None,
    how: How = None,
    recorded: Sequence[torch.Tensor] | None = None,
) -> Work | None:
    """Run one collective of a backend: number it, show it to the observers, translate its errors.

    `how` is for the recorder: what else must fit on all ranks, and no transport looks at. `recorded`: a tensor that it
    is told of in place of inputs and outputs, whose sizes the caller knows to fit, and which are others at each call:
    the recorder would describe each anew.

    Returns: the handle when `async_op`, else None after waiting for it. Within `coalescing_manager` nothing is waited
    for.
    """
    for tensor in inputs if outputs is inputs else (*inputs, *outputs):
        if type(tensor) is not Tensor:
            # Transports read memory below all dispatch: what a collective still brings must be there.
            _check_memory(group, operation, (*inputs, *outputs))
            arguments, inputs, outputs = settled((arguments, inputs, outputs))
            break
    group.sequence = sequence = group.sequence + 1
    group.last_operation = operation
    world = group.world
    call = None
    # A Call costs as much as the rest of this function: with nobody to see it, it is made when an error needs it.
    if world.observers:
        call = Call(operation, group, sequence, inputs, outputs, peer_rank, world.observers, world.action, world.module)
        call.enqueued()
    recorder = world.recorder
    record = None
    if recorder is not None:
        told = (inputs, outputs) if recorded is None else (recorded, (*recorded,))
        record = recorder.begin(operation, group, sequence, *told, peer_rank, how)
    if profiler._is_profiler_enabled:
        run = shown_in_traces(COLLECTIVE, operation, group, run)
    try:
        if world.compares_calls:
            group.waiting_in = sequence
            compare_calls(group, operation, sequence, arguments, inputs, outputs, peer_rank)
            group.waiting_in = 0
        started = run(*arguments)
        if not async_op and group.coalesced is None:
            group.waiting_in = sequence
            started.wait()
            if recorder is not None:
                recorder.end(record, None)
            if call is not None:
                call.completed(None)
            return None
    except Exception as error:
        call_arguments = (operation, group, sequence, inputs, outputs, peer_rank)
        raise _answer(group, error, call or Call(*call_arguments, (), world.action, world.module), record) from error
    work = Work()
    work._started = started
    work._call_arguments = (operation, group, sequence, inputs, outputs, peer_rank)
    work._call = call
    work._recorder = recorder
    work._record = record
    work._error = None
    if group.coalesced is not None:
        group.coalesced.append(work)
    return work if async_op else None


def issue_message(
    group: ProcessGroup,
    operation: str,
    run: Callable[[torch.Tensor, Any, int], TransportWork],
    tensor: torch.Tensor,
    peer_rank: int | None,
    tag: int = 0,
) -> Work:
    """As `issue` for a message, "send" or "recv" of a tensor: it has no number, since only two ranks see it.

    Returns: a handle. torch takes as long for a message as `issue` for what it asks of collectives.
    """
    if type(tensor) is not Tensor:
        _check_memory(group, operation, (tensor,))
        (tensor,) = settled((tensor,))
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    if operation == "send":
        inputs = (tensor,)
    else:
        outputs = (tensor,)
    world = group.world
    call = record = None
    call_arguments: CallArguments = (operation, group, 0, inputs, outputs, peer_rank)
    if world.observers:
        call = Call(*call_arguments, world.observers, world.action, world.module)
        call.enqueued()
    recorder = world.recorder
    if recorder is not None:
        record = recorder.begin(operation, group, 0, inputs, outputs, peer_rank)
    if profiler._is_profiler_enabled:
        run = shown_in_traces(MESSAGE, operation, group, run)
    work = Work()
    try:
        work._started = run(tensor, peer_rank, tag)
    except Exception as error:
        raise _answer(group, error, call or Call(*call_arguments, (), world.action, world.module), record) from error
    work._call_arguments = call_arguments
    work._call = call
    work._recorder = recorder
    work._record = record
    work._error = None
    if group.coalesced is not None:
        group.coalesced.append(work)
    return work


_NO_DDP: Final = " A model that fully_shard has sharded needs no DistributedDataParallel around it."


def _check_memory(group: ProcessGroup, operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ShapeError for a tensor that only stands for others, as a DTensor does: transports would read no memory."""
    for tensor in tensors:
        kind = type(tensor)
        if hasattr(kind, "__tensor_flatten__") and kind is not AsyncCollectiveTensor:
            error = ShapeError(
                operation,
                f"a tensor is a {kind.__module__}.{kind.__qualname__}, which has no memory of its own.",
                f"Give a plain tensor: its to_local(), full_tensor() or wait().{_NO_DDP * (operation == 'broadcast')}",
                rank=group.world.rank,
            )
            group.refuse(operation, error)
            raise error


def _answer(group: ProcessGroup, error: Exception, call: Call, record: Any) -> DisttrainError:
    """Translates the `error` of a transport, and reports it: a refusal to the other ranks, all to the observers."""
    recorder = group.world.recorder
    if type(error) in REFUSALS and call.sequence:
        group.world.refusals.add(group, call.operation, error, call.operation, was_counted=True)
    answer = call.failure(error)
    if recorder is not None and record is not None:
        recorder.end(record, answer)
    call.completed(answer)
    return answer
