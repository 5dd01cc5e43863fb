"""A dump of this process, made while it runs: its ring, and what only the process itself can say beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.dumps.rings.reader import MarkedNs, decode_ring
from disttrain.flight_recorder.record.process.python_stacks import failed_threads, failure_of, thread_stacks
from disttrain.flight_recorder.record.record import GroupProgress

if TYPE_CHECKING:
    from disttrain.process_group import World


def take_snapshot(
    world: World,
    content: bytes,
    marked_ns: Mapping[int, MarkedNs],
    progress: Mapping[int, Sequence[int]],
    reason: str,
    error: BaseException | None,
    *,
    device_is_busy: bool | None,
) -> Dump:
    """The dump of the ring with this content, with the groups of `world`, and all threads' stacks at this moment.

    Args: marked_ns, progress  as `decode_ring` takes them.
    """
    dump, _ = decode_ring(content, marked_ns, progress)
    return replace(
        dump,
        groups=_progress(world, dump),
        dumped_s=time.time(),
        reason=reason,
        failure=None if error is None else failure_of(error),
        threads=thread_stacks() + failed_threads(world.thread_errors),
        device_is_busy=device_is_busy,
    )


def _progress(world: World, dump: Dump) -> tuple[GroupProgress, ...]:
    """Progress of all groups of the world, also of those that have had no call yet or wait for their first to
    connect."""
    on_record = {group.group_name: group for group in dump.groups}
    for group in world.groups:
        progress = on_record.get(group.group_name) or GroupProgress(group.group_name, group.ranks, 0, group.axis_name)
        connecting = group.come_to[1] if group.is_connecting else ""
        on_record[group.group_name] = replace(progress, connecting=connecting)
    return tuple(on_record.values())
