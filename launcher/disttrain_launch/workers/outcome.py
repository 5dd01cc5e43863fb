"""Ends of a worker, a round and a job, as values that nodes tell each other."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from disttrain.reports import REQUEUE_EXIT_CODE


@dataclass(frozen=True)
class Exit:
    """The end of one process; `returncode` is negative for a signal, as in `subprocess`."""

    returncode: int

    @property
    def exit_code(self) -> int:
        """As a shell shows it: 128 + signal number for a signal."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    def __str__(self) -> str:
        return f"killed by {signal_name(-self.returncode)}" if self.returncode < 0 else f"exit code {self.returncode}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Succeeded:
    """Every worker of every node exited with 0."""

    @property
    def exit_code(self) -> int:
        return 0


@dataclass(frozen=True)
class Failed:
    """The first worker that did not."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    pid: int
    returncode: int
    ran_s: float
    last_lines: str
    """The end of its stderr."""
    log_file: str
    """Its stderr on its node's disk; empty when none is kept."""
    summary: str = ""
    """The last line of the exception that it ended with, such as `ValueError: bad batch`; empty when there was none."""
    is_consequence: bool = False
    """By what it says, its peers or what they meet in went away: another rank is to blame, if there is one."""
    left_before: str = ""
    """The ranks of its node that had ended with 0 before, such as `ranks 1, 2`, where it is a consequence."""

    @property
    def exit_code(self) -> int:
        return Exit(self.returncode).exit_code


@dataclass(frozen=True)
class Interrupted:
    """A launcher was sent a signal."""

    signal_number: int
    node_rank: int
    host: str

    @property
    def signal_name(self) -> str:
        return signal_name(self.signal_number)

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


@dataclass(frozen=True)
class Requeued:
    """Workers have saved and left with a code that says so: whoever started the launcher is to start it again."""

    rank: int
    """The first of them."""
    node_rank: int
    host: str

    @property
    def exit_code(self) -> int:
        return REQUEUE_EXIT_CODE


@dataclass(frozen=True)
class Lost:
    """The nodes of the job lost sight of each other."""

    problem: str

    @property
    def exit_code(self) -> int:
        return 1


@dataclass(frozen=True)
class Changed:
    """A round ends because nodes come or go; the job goes on with another one."""

    change: str
    is_orderly: bool = False
    """No node was lost: workers may save first."""

    @property
    def exit_code(self) -> int:
        return 1


Outcome = Succeeded | Failed | Interrupted | Requeued | Lost | Changed


def outweighs(outcome: Outcome, cause: Outcome) -> bool:
    """True when `outcome`, which came to be known after `cause`, is why a round ends all the same."""
    match outcome, cause:
        case Requeued(), Interrupted():
            return True  # The workers were told to go, and have saved.
        case Failed(), Failed():
            return cause.is_consequence and not outcome.is_consequence
        case Lost(), Failed():
            return cause.is_consequence  # What the worker missed was node 0's store, or the nodes that are lost.
        case _:
            return False
