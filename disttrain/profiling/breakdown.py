"""Divides the time of some steps into computing, communication by mesh axis, waits for data and for the host; prints
that as a table. Pure, torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from disttrain import console
from disttrain.flight_recorder.live.step_tally import covered_ns

Spans = Sequence[tuple[int, int]]
"""(begin, end) in nanoseconds."""

_MS_PER_S: Final = 1e3


@dataclass(frozen=True)
class RankTimes:
    """The time of one rank, in seconds per step; all but `step_s` add up to that.

    `computing_s`: operators run (on GPUs: kernels and copies). `communication_s`: by mesh axis, or group without one,
    the rank waits for communication and computes nothing; what is hidden behind computing is not counted.
    `data_wait_s`: nothing of that, and the loader is waited for. `host_bound_s`: nothing of all that; on GPUs, the
    device waits for the host to launch something. `raised`: the error that has ended the profile on this rank.
    """

    rank: int
    num_steps: int
    step_s: float
    computing_s: float
    communication_s: Mapping[str, float]
    data_wait_s: float
    host_bound_s: float
    raised: str = ""


def times_of_rank(
    rank: int,
    num_steps: int,
    window: tuple[int, int],
    computing: Spans,
    communication: Mapping[str, Spans],
    data_waits: Spans,
    *,
    on_device: bool,
    raised: str = "",
) -> RankTimes:
    """Divide `window`. What lies in several kinds of spans counts once: on a device computing comes first, since it
    hides communication; on the host, which does one thing at a time, a wait within an operator is a wait."""
    axes = sorted(communication)
    waits = [communication[axis] for axis in axes]
    kinds = [computing, *waits, data_waits] if on_device else [*waits, data_waits, computing]
    parts_ns, covered, so_far_ns = [], list[tuple[int, int]](), 0
    for spans in kinds:
        covered += _within(window, spans)
        total_ns = covered_ns(covered)
        parts_ns.append(total_ns - so_far_ns)
        so_far_ns = total_ns
    computing_ns = parts_ns.pop(0 if on_device else -1)
    data_wait_ns = parts_ns.pop()
    per_step_s = 1e-9 / max(1, num_steps)
    window_ns = max(0, window[1] - window[0])
    return RankTimes(
        rank=rank,
        num_steps=num_steps,
        step_s=window_ns * per_step_s,
        computing_s=computing_ns * per_step_s,
        communication_s={axis: part_ns * per_step_s for axis, part_ns in zip(axes, parts_ns, strict=True)},
        data_wait_s=data_wait_ns * per_step_s,
        host_bound_s=(window_ns - so_far_ns) * per_step_s,
        raised=raised,
    )


def _within(window: tuple[int, int], spans: Spans) -> Iterator[tuple[int, int]]:
    first, last = window
    return ((max(first, began), min(last, ended)) for began, ended in spans if began < last and ended > first)


@dataclass(frozen=True)
class Breakdown:
    """Where the time of some steps went: `ranks`, by rank; `str` gives a table. The properties are means over ranks.

    `file`: the trace, None where no rank has recorded anything; `absent`: why nothing has come, by rank; `unaligned`:
    ranks whose clock nobody knows.
    """

    ranks: tuple[RankTimes, ...]
    file: Path | None
    absent: Mapping[int, str]
    unaligned: tuple[int, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self._mean(lambda times: times.step_s)

    @property
    def computing_s(self) -> float:
        """Seconds per step, as of `RankTimes`."""
        return self._mean(lambda times: times.computing_s)

    @property
    def communication_s(self) -> dict[str, float]:
        """Seconds per step by mesh axis, likewise."""
        axes = sorted({axis for times in self.ranks for axis in times.communication_s})
        return {axis: self._mean(_communication(axis)) for axis in axes}

    @property
    def data_wait_s(self) -> float:
        """Seconds per step, likewise."""
        return self._mean(lambda times: times.data_wait_s)

    @property
    def host_bound_s(self) -> float:
        """Seconds per step, likewise."""
        return self._mean(lambda times: times.host_bound_s)

    def __str__(self) -> str:
        """A table: a rank per line, then means, and shares of a step."""
        if not self.ranks:
            return "\n".join(["nothing was recorded", *self._notes()])
        columns: list[tuple[str, Callable[[RankTimes], float]]] = [
            ("step", lambda times: times.step_s),
            ("computing", lambda times: times.computing_s),
            *((f"exposed {axis}", _communication(axis)) for axis in self.communication_s),
            ("data wait", lambda times: times.data_wait_s),
            ("host-bound", lambda times: times.host_bound_s),
        ]
        rows = [(str(times.rank), *(_ms(value(times)) for _, value in columns)) for times in self.ranks]
        means = [self._mean(value) for _, value in columns]
        if len(rows) > 1:
            rows.append(("mean", *map(_ms, means)))
        rows.append(("share", *(f"{mean / (means[0] or 1.0):.0%}" for mean in means)))
        most = max(times.num_steps for times in self.ranks)
        what = f"ms per step, of {most} step{'s' if most > 1 else ''}" if most else "ms, without a call of step()"
        table = console.table(("rank", *(name for name, _ in columns)), rows, words=(0,))
        return "\n".join([what, table, *self._notes()])

    def _notes(self) -> list[str]:
        notes = [f"rank {times.rank} has raised {times.raised}" for times in self.ranks if times.raised]
        notes += [f"rank {rank}: {reason}" for rank, reason in sorted(self.absent.items())]
        if self.unaligned:
            names = ", ".join(map(str, self.unaligned))
            notes.append(f"rank {names}: its clock could not be compared with rank 0's; it may be shifted in the trace")
        if self.file is not None:
            notes.append(f"trace: {self.file}, for https://ui.perfetto.dev")
        return notes

    def _mean(self, value: Callable[[RankTimes], float]) -> float:
        return sum(map(value, self.ranks)) / len(self.ranks) if self.ranks else 0.0


def _communication(axis: str) -> Callable[[RankTimes], float]:
    return lambda times: times.communication_s.get(axis, 0.0)


def _ms(duration_s: float) -> str:
    return f"{duration_s * _MS_PER_S:.2f}"
