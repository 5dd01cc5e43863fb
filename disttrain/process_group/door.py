"""The one door: every collective and message of every layer passes `issue`, where observers sit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.process_group.async_tensor import AsyncCollectiveTensor, settled
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.observer import Call
from disttrain.process_group.work import TransportWork, Work

POINT_TO_POINT = frozenset({"send", "recv"})


def issue(
    group: ProcessGroup,
    operation: str,
    run: Callable[..., TransportWork],
    arguments: tuple[Any, ...],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    async_op: bool,
    peer_rank: int | None = None,
) -> Work | None:
    """Run one operation of a backend: number it, show it to the observers, translate its errors.

    Returns: the handle when `async_op`, else None after waiting for it.
    """
    for tensor in (*inputs, *outputs):
        if type(tensor) is AsyncCollectiveTensor:
            # Transports read memory below all dispatch: what a collective still brings must be there.
            arguments, inputs, outputs = settled((arguments, inputs, outputs))
            break
    if operation not in POINT_TO_POINT:
        group.sequence += 1
        sequence = group.sequence
    else:
        sequence = 0
    call = Call(operation, group, sequence, inputs, outputs, peer_rank, group.world.observers)
    call.enqueued()
    try:
        transport_work = run(*arguments)
    except Exception as error:
        answer = call.failure(error)
        call.completed(answer)
        raise answer from error
    work = Work(call, transport_work)
    if async_op:
        return work
    work.wait()
    return None
