"""The budget of `make test`: the processors' seconds of the run, with all its processes, and the tests it is spent on.

Ten minutes of two cores are 1,200 seconds, of which tests leave some to waiting. The seconds are those of pytest's own
process and all its descendants, so that they are the same beside other programs, where the time on the clock is not.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.representatives import OPTION

BUDGET_S = 1100.0
NUM_DEAREST = 10


class Process(NamedTuple):
    """A process as /proc shows it, perhaps one that has ended and was not waited for."""

    parent: int
    seconds: float
    """Of itself, and of its children that have ended and were waited for."""


class Budget:
    """Adds up the time that each test takes, and tells it at the end of a run."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._wall_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._wall_s[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        spent_s = seconds_of_tree(os.getpid(), dict(processes()))
        for line in told(spent_s, self._budget_s, self._wall_s):
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Only where a run has a budget, and where /proc tells what it spends."""
    if config.getoption(OPTION) and not hasattr(config, "workerinput") and Path("/proc/self/stat").exists():
        config.pluginmanager.register(Budget(BUDGET_S))


def told(spent_s: float, budget_s: float, wall_s: Mapping[str, float]) -> list[str]:
    """One line, and one for each of the dearest tests if more than the budget is spent."""
    total = f"processors: {spent_s:,.0f} s of the {budget_s:,.0f} s that `make test` may take"
    if spent_s <= budget_s:
        return [total]
    dearest = sorted(wall_s, key=lambda test: -wall_s[test])[:NUM_DEAREST]
    advice = "Make tests cheaper, or mark cases as a sweep (tests/README.md). The dearest, on the clock:"
    return [f"{total}: too much. {advice}", *(f"  {wall_s[test]:5.1f} s  {test}" for test in dearest)]


def seconds_of_tree(root: int, known: Mapping[int, Process]) -> float:
    """Those of a process and its descendants, but for what was waited for by nobody of them."""
    children = defaultdict(list)
    for pid, process in known.items():
        children[process.parent].append(pid)
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += known[pid].seconds
        waiting += children[pid]
    return total


def processes() -> Iterator[tuple[int, Process]]:
    """All of this machine, by pid. Source: proc_pid_stat(5)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):  # it has gone meanwhile
                continue
            yield int(entry.name), read_stat(text)


def read_stat(text: str) -> Process:
    """From its line in /proc, where the name of the program may have blanks and parentheses."""
    fields = text.rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))
    return Process(int(fields[1]), ticks / os.sysconf("SC_CLK_TCK"))
