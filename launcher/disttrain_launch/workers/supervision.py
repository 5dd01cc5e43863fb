"""Supervises one node's workers in one round: events in, commands out, no I/O and no clock.

The first cause decides how the round ends: a worker that fails, a signal to a launcher, or word from another node.
Whatever the cause, the remaining workers are signalled, given a grace, and killed when it is over. Whom even that does
not end, since the kernel does not let go of it, is left behind. Node 0 decides whose cause was first; its word comes as
`RoundEnds` and is final.

Who merely lost its peer often ends before the peer has: then the others may end by themselves for a while, and a better
cause takes the place of the first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from disttrain.reports import REQUEUE_EXIT_CODE
from disttrain_launch.workers.outcome import Changed, Failed, Interrupted, Outcome, Requeued, Succeeded, outweighs

KILL_S = 5.0
"""The time that the kernel may take to end processes that were sent SIGKILL."""
PATIENCE_S = 10.0
"""The time after the first worker has ended well at which it is said that others are waited for."""
SETTLE_S = 3.0
"""The time that the others may take to end by themselves, where the first to end says that another is to blame, or
where what all of them say is shown or kept."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class WorkersExited:
    local_ranks: frozenset[int]
    failures: tuple[Failed, ...]


@dataclass(frozen=True)
class SignalCame:
    number: int


@dataclass(frozen=True)
class RoundEnds:
    """It ends on all nodes, and that is why."""

    cause: Outcome


@dataclass(frozen=True)
class DeadlinePassed:
    pass


Event = WorkersExited | SignalCame | RoundEnds | DeadlinePassed


@dataclass(frozen=True)
class Send:
    """Signal the workers that are left; with_children: their process groups, else only themselves."""

    number: int
    with_children: bool


@dataclass(frozen=True)
class SetDeadline:
    after_s: float


@dataclass(frozen=True)
class Tell:
    """Let node 0 know."""

    outcome: Outcome


@dataclass(frozen=True)
class End:
    """No worker of this node is left, but for what was left behind."""

    outcome: Outcome


@dataclass(frozen=True)
class SayAwaited:
    """Some workers ended well a while ago, and others have not ended."""

    local_ranks: frozenset[int]


@dataclass(frozen=True)
class LeaveBehind:
    """The workers that are left were killed and did not end: nobody waits for them any more."""


@dataclass(frozen=True)
class AskForDumps:
    """Have the workers that are left write what their flight recorders know; the deadline is when they have, and not
    before so much time has passed."""

    settle_s: float = 0.0


Command = Send | SetDeadline | AskForDumps | SayAwaited | LeaveBehind | Tell | End


class Supervision:
    def __init__(
        self,
        local_ranks: Iterable[int],
        *,
        node_rank: int,
        host: str,
        stop_grace_s: float,
        shutdown_timeout_s: float,
        asks_for_dumps: bool = False,
        shows_all: bool = False,
    ) -> None:
        self._alive = set(local_ranks)
        self._num_workers = len(self._alive)
        self._node_rank = node_rank
        self._host = host
        self._stop_grace_s = stop_grace_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._asks_for_dumps = asks_for_dumps
        self._shows_all = shows_all
        self._is_dumping = False
        self._is_killed = False
        self._sent: set[int] = set()
        """Signals by which workers were ended."""
        self._cause: Outcome | None = None
        self._was_interrupted = False
        self._was_told = False
        """Node 0 knows that this launcher was sent a stop signal."""

    @property
    def is_stopping(self) -> bool:
        return self._cause is not None

    @property
    def is_orderly(self) -> bool:
        """True when workers may save and leave: nothing is broken, but the job, or the round, has to end."""
        match self._cause:
            case Changed(_, is_orderly):
                return is_orderly
            case cause:
                return isinstance(cause, Interrupted | Requeued)

    def handle(self, event: Event) -> list[Command]:
        match event:
            case WorkersExited(local_ranks, failures):
                return self._workers_exited(local_ranks, failures)
            case SignalCame(number):
                return self._signal_came(number)
            case RoundEnds(cause):
                was_stopping, self._cause = self.is_stopping, cause
                return ([] if was_stopping else self._stop(cause)) + self._end_if_over()
            case DeadlinePassed():
                return self._deadline_passed() if self._alive else []

    def _workers_exited(self, local_ranks: frozenset[int], failures: tuple[Failed, ...]) -> list[Command]:
        is_first = len(self._alive) == self._num_workers
        self._alive -= local_ranks
        cause = self._cause_of(self._by_themselves(failures))
        if cause is not None and not self.is_stopping:
            return self._tell(cause) + self._end_if_over()
        if not self._alive and not self.is_stopping:
            return [Tell(Succeeded()), End(Succeeded())]
        if is_first and not self.is_stopping:
            return [SetDeadline(PATIENCE_S)]
        if cause is not None and self._cause is not None and outweighs(cause, self._cause):
            self._cause = cause
            return [Tell(cause), *self._end_if_over()]
        if isinstance(cause, Requeued) and isinstance(self._cause, Changed) and self._was_told:
            return [Tell(cause), *self._end_if_over()]
        return self._end_if_over()

    def _by_themselves(self, failures: Iterable[Failed]) -> list[Failed]:
        """Those that the launcher has not ended. Who was about to end with an error of its own, and was too slow, has
        said so: it counts as ended by Python, with 1."""
        stopped = {failed: -failed.returncode in self._sent for failed in failures}
        return [
            replace(failed, returncode=1) if was_stopped else failed
            for failed, was_stopped in stopped.items()
            if failed.summary or not was_stopped
        ]

    def _cause_of(self, failures: Sequence[Failed]) -> Requeued | Failed | None:
        """The likeliest cause of several exits at once; none where all ended well."""
        left = min((failed.rank for failed in failures if failed.returncode == REQUEUE_EXIT_CODE), default=None)
        if left is not None:
            return Requeued(left, self._node_rank, self._host)
        # One killed by a signal is likelier: peers fail with exit codes.
        order = {(failure.is_consequence, failure.returncode >= 0, failure.rank): failure for failure in failures}
        return order[min(order)] if order else None

    def _signal_came(self, number: int) -> list[Command]:
        if number in PASSED_SIGNALS:
            return [Send(number, with_children=False)] if self._alive else []
        if number == signal.SIGINT and self._was_interrupted:
            return self._kill() if self._alive else []
        self._was_interrupted |= number == signal.SIGINT
        interrupted = Interrupted(number, self._node_rank, self._host)
        if not self.is_stopping:
            self._was_told = True
            return self._tell(interrupted) + self._end_if_over()
        sent: list[Command] = [Send(number, with_children=True)] if self._alive else []
        if self._was_told or isinstance(self._cause, Interrupted):
            return sent
        # Whatever the round is stopped for, nobody wants another one.
        self._was_told = True
        return [*sent, Tell(interrupted)]

    def _tell(self, cause: Outcome) -> list[Command]:
        self._cause = cause
        return [*self._stop(cause), Tell(cause)]

    def _stop(self, cause: Outcome) -> list[Command]:
        if not self._alive:
            return []
        if isinstance(cause, Requeued):
            return [SetDeadline(self._shutdown_timeout_s)]  # They leave by themselves.
        if self.is_orderly:
            number = cause.signal_number if isinstance(cause, Interrupted) else signal.SIGTERM
            return [Send(number, with_children=True), SetDeadline(self._shutdown_timeout_s)]
        if self._asks_for_dumps:
            self._is_dumping = True
            settles = isinstance(cause, Failed) and (cause.is_consequence or self._shows_all)
            return [AskForDumps(SETTLE_S if settles else 0.0)]
        return self._terminate()

    def _terminate(self) -> list[Command]:
        self._sent.add(signal.SIGTERM)
        return [Send(signal.SIGTERM, with_children=True), SetDeadline(self._stop_grace_s)]

    def _deadline_passed(self) -> list[Command]:
        if not self.is_stopping:
            return [SayAwaited(frozenset(self._alive))]
        if self._is_dumping:
            self._is_dumping = False
            return self._terminate()
        if not self._is_killed:
            return self._kill()
        self._alive.clear()
        return [LeaveBehind(), *self._end_if_over()]

    def _kill(self) -> list[Command]:
        self._is_killed, self._is_dumping = True, False
        self._sent.add(signal.SIGKILL)
        return [Send(signal.SIGKILL, with_children=True), SetDeadline(KILL_S)]

    def _end_if_over(self) -> list[Command]:
        return [End(self._cause)] if self._cause is not None and not self._alive else []
