"""Communication times of training steps, as values: one rank's window of steps, and those of all ranks put together.

The rank that comes last to a collective waits least in it. So in each group a rank's lateness is the time by which it
waited less than the one that waited longest. Clocks are never compared. Torch-free.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

SYNCHRONIZING: Final = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"}
"""Operations that nobody leaves before all have come."""
MAX_OPEN: Final = 8
"""Windows that some ranks have told of; when there are more, the oldest is summed up without those that have not."""


class Ended(NamedTuple):
    """A call with other ranks that has ended: it was called, waited for, and left, by this rank's monotonic clock."""

    group_name: str
    axis_name: str
    operation: str
    began_ns: int
    waits_ns: int
    ended_ns: int


@dataclass
class Tally:
    """One rank's window: `take` its calls, then `told`."""

    began_ns: int
    spans: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    waits: list[tuple[int, int]] = field(default_factory=list)
    waited_ns: Counter[str] = field(default_factory=Counter)

    def take(self, call: Ended) -> None:
        """Count a call."""
        self.spans[call.group_name, call.axis_name].append((call.began_ns, call.ended_ns))
        self.waits.append((call.waits_ns, call.ended_ns))
        if call.operation in SYNCHRONIZING:
            self.waited_ns[call.group_name] += call.ended_ns - call.began_ns

    def told(self, rank: int, step: int, num_steps: int, now_ns: int, *, host_waits: bool = True) -> bytes:
        """The message of this rank to rank 0 about `num_steps` steps up to `step`.

        `host_waits` is False where the host goes on and a device waits.
        """
        everything = [span for spans in self.spans.values() for span in spans]
        groups = [
            (name, axis_name, covered_ns(spans), self.waited_ns[name])
            for (name, axis_name), spans in self.spans.items()
        ]
        shares_ns = covered_ns(everything), covered_ns(self.waits) if host_waits else None
        return json.dumps([rank, step, num_steps, now_ns - self.began_ns, shares_ns, groups]).encode()


@dataclass
class Windows:
    """Windows that are not complete yet; `hear` returns those that are."""

    world_size: int
    open: dict[int, dict[int, list[Any]]] = field(default_factory=dict)

    def hear(self, message: bytes) -> list[dict[str, Any]]:
        """Take what one rank tells. Returns: summaries of the windows that are complete, or as complete as they get."""
        rank, step, *_ = window = json.loads(message)
        self.open.setdefault(step, {})[rank] = window
        num_too_many = len(self.open) - MAX_OPEN
        over = [
            step
            for index, step in enumerate(sorted(self.open))
            if len(self.open[step]) == self.world_size or index < num_too_many
        ]
        return [summary_of(list(self.open.pop(step).values())) for step in over]


def summary_of(windows: Sequence[list[Any]]) -> dict[str, Any]:
    """A plain dict of all that the ranks have told of one window; times are seconds per step."""
    _, step, num_steps, *_ = windows[0]
    per_step_s = 1e-9 / num_steps
    communication_s: Counter[str] = Counter()
    waited_ns: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank, _, _, _, _, groups in windows:
        for name, axis_name, busy_ns, own_ns in groups:
            communication_s[axis_name or name] += busy_ns * per_step_s / len(windows)
            waited_ns[name][rank] = own_ns
    late_s = dict.fromkeys(sorted(rank for rank, *_ in windows), 0.0)
    for waited in waited_ns.values():
        longest_ns = max(waited.values())
        for rank, own_ns in waited.items():
            late_s[rank] += (longest_ns - own_ns) * per_step_s
    total_ns = sum(window[3] for window in windows) or 1
    busy_ns, waiting_ns = zip(*(window[4] for window in windows), strict=True)
    return {
        "step": step,
        "num_steps": num_steps,
        "num_ranks": len(windows),
        "step_s": total_ns * per_step_s / len(windows),
        "waiting_share": None if None in waiting_ns else sum(waiting_ns) / total_ns,
        "communication_share": sum(busy_ns) / total_ns,
        "communication_s": dict(sorted(communication_s.items())),
        "lateness_s": late_s,
    }


def covered_ns(spans: Sequence[tuple[int, int]]) -> int:
    """The time that `spans` cover; what several cover counts once."""
    total_ns = until_ns = 0
    for began_ns, ended_ns in sorted(spans):
        total_ns += max(0, ended_ns - max(began_ns, until_ns))
        until_ns = max(until_ns, ended_ns)
    return total_ns
