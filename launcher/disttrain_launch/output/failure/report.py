"""Reports the end of a job, as the last thing on the screen."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from disttrain_launch.output.streams.holding import without_frames
from disttrain_launch.request.job import OPERATION, JobSpec
from disttrain_launch.workers.last_words import excerpt
from disttrain_launch.workers.outcome import (
    Changed,
    Exit,
    Failed,
    Interrupted,
    Lost,
    Outcome,
    Requeued,
    Succeeded,
    signal_name,
)

_HINTS: dict[int, str] = {
    signal.SIGKILL: "SIGKILL often comes from the kernel when memory runs out: see dmesg, or the container's limits.",
    signal.SIGBUS: "SIGBUS often means that shared memory ran out: see df /dev/shm.",
}
_FAILED_NODE = re.compile(r"failed first: .* \[node ([0-9]+), host ")


def ending(outcome: Outcome, spec: JobSpec, note: str = "", *, is_told_elsewhere: bool = False) -> str:
    """The last words about a job, with `note` after them; empty when all went well.

    `is_told_elsewhere`: node 0 says all of it; here one line is enough.
    """
    match outcome:
        case Succeeded():
            return ""
        case Failed() if is_told_elsewhere:
            return _who_failed(outcome)
        case Failed():
            return _failure(outcome, is_verbose=spec.logs.is_verbose) + (f"    {note}\n" if note else "")
        case Interrupted(number, node_rank, host):
            where = f" on node {node_rank} ({host})" if spec.num_nodes > 1 else ""
            return f"{OPERATION}: stopped by {signal_name(number)}{where}.\n"
        case Requeued(rank, node_rank, host):
            where = f" [node {node_rank}, host {host}]" if spec.num_nodes > 1 else ""
            return f"{OPERATION}: rank {rank} left with exit code {outcome.exit_code}, to be started again.{where}\n"
        case Lost(problem) | Changed(problem):
            return f"{OPERATION}: {problem}\n"


def node_that_failed(text: str) -> int | None:
    """The node rank that an ending in `text` blames; None where none does. For who starts launchers by other means."""
    match = _FAILED_NODE.search(text)
    return None if match is None else int(match[1])


def _failure(failed: Failed, *, is_verbose: bool) -> str:
    said = excerpt(failed.last_lines)
    lines = (said if is_verbose else without_frames(said)).splitlines()
    text = f"{OPERATION}: the last lines on stderr of rank {failed.rank}:\n" if lines else ""
    text += "".join(f"    {line}\n" for line in lines)
    text += _who_failed(failed)
    if failed.returncode < 0 and (hint := _HINTS.get(-failed.returncode)):
        text += f"    {hint}\n"
    if failed.left_before:
        text += f"    {failed.left_before} had ended before, with exit code 0, and may have been waited for.\n"
    if failed.log_file:
        text += f"    its whole stderr: {Path(failed.log_file)}\n"
    return text


def _who_failed(failed: Failed) -> str:
    return (
        f"{OPERATION}: rank {failed.rank} failed first: {Exit(failed.returncode)} after {failed.ran_s:.1f} s "
        f"[node {failed.node_rank}, host {failed.host}, local rank {failed.local_rank}, pid {failed.pid}]\n"
    )
