"""A sight of a job as a table: of its nodes, or of its workers where it has one node. Pure, until it is drawn."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disttrain import console
from disttrain_launch.output.view import RUNNING, JobNode, Sight, WorkerState, combined
from disttrain_launch.request.job import UNNAMED
from disttrain_launch.workers.outcome import Exit

SILENT_S = 15.0
"""Whoever reports is named as silent after so long."""
MAX_NUMBERS = 6
_FIRST_NAMES = ("step", "loss", "tokens_per_s")
_MAX_NAME = 16
_GOOD = (RUNNING, str(Exit(0)))


@dataclass(frozen=True)
class Table:
    """Rows of a table. `words`: the columns to the left; numbers stand to the right. `notes`: for whom all wait."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[int, ...]
    notes: tuple[str, ...]
    num_left_out: int = 0

    def lines(self) -> list[str]:
        """Without colours, for whatever is no terminal."""
        more = [f"and {self.num_left_out} more"] if self.num_left_out else []
        rows = console.table(self.head, self.rows, self.words).splitlines() if self.rows else []
        return [self.title, *(f"  {line}" for line in [*rows, *more]), *self.notes]


def table_of(sight: Sight, now_s: float, max_rows: int = 1000) -> Table:
    """`now_s`: in seconds since 1970."""
    job, everyone = sight.job, sight.everyone
    placed = [node for node in job.nodes if node.group_rank is not None] or list(job.nodes)
    numbers = combined(worker.numbers for worker in everyone)
    names = _chosen(numbers)
    head: tuple[str, ...]
    words: tuple[int, ...]
    groups: list[tuple[tuple[str, ...], Sequence[WorkerState]]]
    if len(placed) > 1:
        head, words = ("node", "host", "workers"), (1,)
        groups = [(_node_cells(sight, node), sight.workers(node.agent)) for node in _in_order(placed)]
    else:
        head, words = ("rank", "pid"), ()
        groups = [((str(worker.rank), str(worker.pid)), (worker,)) for worker in everyone]
    rows = [
        (*cells, *_texts(names, combined(worker.numbers for worker in workers)), _state(job.phase, workers, now_s))
        for cells, workers in groups
    ]
    if len(rows) > 1 and names:
        rows.append(("all", *[""] * (len(head) - 1), *_texts(names, numbers), ""))
    shown = rows if len(rows) <= max_rows else [*rows[: max_rows - 1], rows[-1]]
    return Table(
        title=_title(sight, placed, now_s),
        head=(*head, *(_shown_name(name) for name in names), "state"),
        rows=tuple(shown),
        words=(*words, len(head) + len(names)),
        notes=(f"waiting for {job.awaited}",) if job.awaited else (),
        num_left_out=len(rows) - len(shown),
    )


def drawn(table: Table, columns: int, *, is_coloured: bool) -> list[bytes]:
    """For a terminal of this width, each line narrower than it. Needs rich."""
    from rich.console import Console  # heavy, and not everywhere
    from rich.rule import Rule  # as above
    from rich.table import Table as RichTable  # as above
    from rich.text import Text  # as above

    screen = Console(
        file=io.StringIO(),
        width=max(columns - 1, 20),
        force_terminal=True,
        color_system="standard" if is_coloured else None,
        highlight=False,
    )
    screen.print(Rule(Text(table.title, style="bold"), align="left", style="dim"))
    if table.rows:
        grid = RichTable(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for column, name in enumerate(table.head):
            grid.add_column(Text(name), no_wrap=True, justify="left" if column in table.words else "right")
        for row in table.rows:
            style = "bold" if row[0] == "all" else "" if row[-1] in _GOOD else "yellow"
            grid.add_row(*(Text(cell) for cell in row), style=style)
        screen.print(grid)
    for note in [*([f"and {table.num_left_out} more"] if table.num_left_out else []), *table.notes]:
        screen.print(Text(note, style="yellow"), no_wrap=True, overflow="ellipsis")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return [line.encode(encoding, "replace") for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def _title(sight: Sight, placed: Sequence[JobNode], now_s: float) -> str:
    job = sight.job
    num_workers = sum(node.num_workers for node in placed)
    facts = [
        job.phase if job.round < 1 else f"{job.phase}, round {job.round}",
        f"{len(placed)} node{'s' if len(placed) != 1 else ''}, {num_workers} worker{'s' if num_workers != 1 else ''}",
        *([f"{len(job.nodes) - len(placed)} spare"] if len(job.nodes) > len(placed) else []),
        *([f"restart {job.num_restarts} of {job.max_restarts}"] if job.max_restarts else []),
        console.clock(max(now_s - job.started_s, 0.0)),
    ]
    name = f"job {job.job}" if job.job != UNNAMED else "job"
    return f"{name}: {', '.join(facts)}"


def _in_order(nodes: Sequence[JobNode]) -> list[JobNode]:
    return sorted(nodes, key=lambda node: node.group_rank or 0)


def _node_cells(sight: Sight, node: JobNode) -> tuple[str, ...]:
    workers = sight.workers(node.agent)
    num_running = sum(worker.state == RUNNING for worker in workers)
    count = str(node.num_workers) if num_running in (0, node.num_workers) else f"{num_running} of {node.num_workers}"
    return ("-" if node.group_rank is None else str(node.group_rank), node.host, count)


def _state(phase: str, workers: Sequence[WorkerState], now_s: float) -> str:
    if not workers:
        return phase
    states = Counter(worker.state for worker in workers)
    text = ", ".join(state if len(states) == 1 else f"{count} {state}" for state, count in states.most_common())
    report_times_s = [worker.told_s for worker in workers if worker.told_s is not None and worker.state == RUNNING]
    silent_s = now_s - min(report_times_s, default=now_s)
    return text if silent_s < SILENT_S else f"{text}, silent for {console.clock(silent_s)}"


def _chosen(numbers: Mapping[str, object]) -> list[str]:
    others = sorted(name for name in numbers if name not in _FIRST_NAMES)
    return [*(name for name in _FIRST_NAMES if name in numbers), *others][:MAX_NUMBERS]


def _shown_name(name: str) -> str:
    text = f"{name.removesuffix('_per_s')}/s" if name.endswith("_per_s") else name
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_NAME])


def _texts(names: Sequence[str], numbers: Mapping[str, tuple[float, float] | None]) -> list[str]:
    return [_text(name, numbers[name]) if name in numbers else "" for name in names]


def _text(name: str, ends: tuple[float, float] | None) -> str:
    if ends is None:
        return "?"
    low, high = (_number_text(name, end) for end in ends)
    return low if low == high else f"{low}-{high}"


def _number_text(name: str, value: float) -> str:
    if name.endswith("_per_s"):
        return console.short(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"
