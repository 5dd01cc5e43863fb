"""The agent: starts a node's workers and lives in one event loop until they are gone.

It waits for exits, signals, log bytes and word from other nodes all at once; it never polls and never blocks on any one
of them. What to do about an event is `supervision`'s matter; this is its shell.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from disttrain import settings
from disttrain.flight_recorder.record.process.process_state import has_handler
from disttrain.reports import ENDING, NOTICED, REQUEUE_EXIT_CODE
from disttrain_launch.output.events import Record, exit_fields, happened
from disttrain_launch.output.failure.explaining import Explanations
from disttrain_launch.output.publishing import TableFeed
from disttrain_launch.output.streams.logs import StreamPump
from disttrain_launch.output.streams.workers import Output
from disttrain_launch.output.terminal.screen import Outlet
from disttrain_launch.rendezvous.link import JobLink
from disttrain_launch.rendezvous.messages import Done, Run, Stop
from disttrain_launch.request.job import OPERATION, JobSpec
from disttrain_launch.workers import last_words
from disttrain_launch.workers.binding import chosen_bindings, inherited_by_children
from disttrain_launch.workers.board import Board
from disttrain_launch.workers.dumps import dump_folder, ring_folder
from disttrain_launch.workers.environment import Meeting, worker_environment
from disttrain_launch.workers.leftovers import state_of, stop_leftovers
from disttrain_launch.workers.outcome import Changed, Exit, Failed, Interrupted, Lost, Outcome, signal_name
from disttrain_launch.workers.signals import SignalPipe
from disttrain_launch.workers.supervision import (
    PASSED_SIGNALS,
    PATIENCE_S,
    STOP_SIGNALS,
    AskForDumps,
    DeadlinePassed,
    End,
    Event,
    LeaveBehind,
    RoundEnds,
    SayAwaited,
    Send,
    SetDeadline,
    SignalCame,
    Supervision,
    Tell,
    WorkersExited,
)
from disttrain_launch.workers.warden import Warden
from disttrain_launch.workers.worker import Worker

if TYPE_CHECKING:
    from disttrain_launch.workers.dump_asking import Dumping


class Agent:
    """One node's workers, round after round.

    Args: name  of this agent, which its workers carry;  environ  that workers inherit;  meeting  where processes of the
          job meet;  link  to node 0;  board  of its workers;  has_table  whether this node shows the job's.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        name: str,
        host: str,
        environ: Mapping[str, str],
        meeting: Meeting,
        signals: SignalPipe,
        warden: Warden,
        link: JobLink,
        board: Board,
        has_table: bool,
    ) -> None:
        self._spec = spec
        self._name = name
        self._workers: dict[int, Worker] = {}
        self._ended_well: set[int] = set()
        self._host = host
        self._environ = environ
        self._meeting = meeting
        self._signals = signals
        self._warden = warden
        self._link = link
        self._board = board
        self._was_noticed = False
        """This launcher was sent SIGUSR1: whatever round comes, its workers are to stop."""
        self._bindings = chosen_bindings(spec.numa_binding, spec.num_local_workers, environ)
        self._selector = selectors.DefaultSelector()
        self.output = Output(spec, environ, self._selector)
        self.feed = None
        """Takes the table, where one can be shown."""
        if has_table and self.output.can_show_table:
            self.feed = TableFeed(is_coloured=not settings.NO_COLOR.read(environ))
        self.explanations = Explanations()
        """The words that are said later, while a round runs."""
        self.round = -1
        """The last one that it took part in."""

    def run(self, run: Run) -> Outcome:
        """Start this round's workers and return once none of them, nor of their children, is left.

        Raises LaunchError when they cannot be started.
        """
        self.round = run.assignment.round
        self._group_rank = run.assignment.group_rank
        self._workers, self._ended_well = {}, set()
        self._running: set[int] = set()
        self._board.begin(self.round)
        self._deadline_s: float | None = None
        self._settled_s = 0.0
        self._outcome: Outcome | None = None
        self.dump_folder = dump_folder(self._environ, self.round)
        self._dumping: Dumping | None = None
        self._supervision = Supervision(
            range(self._spec.num_local_workers),
            node_rank=self._group_rank,
            host=self._host,
            stop_grace_s=self._spec.stop_grace_s,
            shutdown_timeout_s=self._spec.shutdown_timeout_s,
            asks_for_dumps=True,
            shows_all=self._spec.logs.wants_all,
        )
        came = self._signals.read()
        self._was_noticed |= signal.SIGUSR1 in came
        if self._was_noticed:
            self._board.mark(NOTICED)
        if stops := [number for number in came if number in STOP_SIGNALS]:
            interrupted = Interrupted(stops[0], self._group_rank, self._host)
            self._link.ended(self.round, interrupted)
            return interrupted
        try:
            for local_rank in range(self._spec.num_local_workers):
                self._start_worker(local_rank, run)
            self._link.tell([self._record("worker_started", worker) for worker in self._workers.values()])
            return self._loop()
        finally:
            self._signals.interrupts = False
            self._end_dumping()
            for fd in self._sources():
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)
            for worker in self._workers.values():
                worker.send(signal.SIGKILL, with_children=True)
            self._say_left(
                stop_leftovers(self._name, {worker.pid for worker in self._workers.values()}, self._spec.stop_grace_s)
            )
            for worker in self._workers.values():
                worker.poll()
            self._collect_rings()
            self._warden.ended()
            if not self._has_broken():
                self.output.release()  # Nobody is to blame for what they say.
            self.output.end_all()

    def _has_broken(self) -> bool:
        """True when somebody may be to blame for the round's end."""
        return isinstance(self._outcome, Failed | Lost | Changed) and not self._supervision.is_orderly

    @property
    def stopped_ranks(self) -> list[int]:
        """Of the last round's workers, those that did not end well."""
        return [worker.rank for local_rank, worker in self._workers.items() if local_rank not in self._ended_well]

    def _start_worker(self, local_rank: int, run: Run) -> None:
        inherited = {**self.output.worker_variables(), **self._environ}
        inherited.pop(settings.REPORT_FILE.name, None)  # A launcher within a worker has pages of its own.
        inherited.update(self._board.variables(local_rank))
        inherited[settings.FLIGHT_DIR.name] = str(self.dump_folder)
        environ = worker_environment(inherited, self._spec, run, self._meeting, self._name, local_rank)
        with inherited_by_children(self._bindings[local_rank]):
            worker = Worker(
                self._spec.command, environ, rank=run.assignment.first_rank + local_rank, local_rank=local_rank
            )
        self._workers[local_rank] = worker
        self._running.add(local_rank)
        self._warden.started(worker.pid)
        self._board.started(worker)
        self.output.add(worker)

    def _loop(self) -> Outcome:
        self._signals.interrupts = False
        for fd, source in self._sources().items():
            self._selector.register(fd, selectors.EVENT_READ, source)
        while self._outcome is None:
            self.output.balance()
            for key, _ in self._selector.select(self._seconds_left(self.output.move_due())):
                match key.data:
                    case StreamPump() | Outlet():
                        self.output.move(key.data)
                    case SignalPipe():
                        self._read_signals()
                    case JobLink():
                        self._hear_word()
                    case Meeting():
                        self._selector.unregister(key.fd)
                        self._link.lose("its process ended.")
                    case _ if self._dumping is not None and self._dumping.is_over:
                        self._deadline_s = max(self._settled_s, time.monotonic())
                    case TableFeed() | Explanations():
                        key.data.show(self.output)
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                self._deadline_s = None
                self._end_dumping()
                self._handle(DeadlinePassed())
        return self._outcome

    def _sources(self) -> dict[int, object]:
        """All that is waited for besides output, by descriptor."""
        sources = (
            (self._signals.fd, self._signals),
            (self._link.fd, self._link),
            (self._meeting.server_fd, self._meeting),
            (self.explanations.fd, self.explanations),
            (None if self.feed is None else self.feed.fd, self.feed),
        )
        return {fd: source for fd, source in sources if fd is not None}

    def _seconds_left(self, output_s: float | None) -> float | None:
        """Until something is to be done although nothing comes."""
        if self._deadline_s is None:
            return output_s
        left_s = max(0.0, self._deadline_s - time.monotonic())
        return left_s if output_s is None else min(left_s, output_s)

    def _read_signals(self) -> None:
        numbers = self._signals.read()
        self._was_noticed |= signal.SIGUSR1 in numbers
        # A cluster ends all processes of a job at once: then workers end by the signal, and are not at fault.
        for number in numbers:
            if number in STOP_SIGNALS:
                self._handle(SignalCame(number))
        # Exits before others: a signal to a worker that has ended would only confuse.
        self._reap()
        for number in numbers:
            if number in PASSED_SIGNALS:
                self._handle(SignalCame(number))

    def _hear_word(self) -> None:
        match self._link.word:
            case Stop(round, cause) if round == self.round:
                self._handle(RoundEnds(cause))
            case Done(outcome):
                self._handle(RoundEnds(outcome))

    def _reap(self) -> None:
        exits = {local_rank: self._workers[local_rank].poll() for local_rank in self._running}
        ended = {local_rank: end for local_rank, end in exits.items() if end is not None}
        if not ended:
            return
        self._running -= ended.keys()
        for local_rank, end in ended.items():
            self._board.ended(local_rank, end)
        self._link.tell([self._exit_record(self._workers[local_rank], end) for local_rank, end in ended.items()])
        # What they said before they ended is shown before anything is said about their end.
        last_lines = {local_rank: self.output.drain(local_rank) for local_rank in ended}
        for local_rank, end in ended.items():
            if end.returncode == 0:
                self._ended_well.add(local_rank)
                self.output.release(self._workers[local_rank].rank)
        failures = [
            self._failure(self._workers[local_rank], end, last_lines[local_rank])
            for local_rank, end in ended.items()
            if end.returncode != 0
        ]
        if not self._supervision.is_stopping:
            for failed in failures:
                if failed.returncode != REQUEUE_EXIT_CODE:
                    self.output.mention(f"{OPERATION}: rank {failed.rank} ended: {Exit(failed.returncode)}\n")
        self._handle(WorkersExited(frozenset(ended), tuple(failures)))

    def _record(self, event: str, worker: Worker, **more: Any) -> Record:
        about = {"rank": worker.rank, "local_rank": worker.local_rank, "host": self._host, "pid": worker.pid}
        return happened(event, round=self.round, **about, **more)

    def _exit_record(self, worker: Worker, end: Exit) -> Record:
        ran_s = round(time.monotonic() - worker.started_s, 3)
        return self._record("worker_exited", worker, **exit_fields(end), ran_s=ran_s)

    def _failure(self, worker: Worker, end: Exit, text: str) -> Failed:
        # With other exit codes a script says that it has handled what it printed.
        has_raised = end.returncode == 1 or end.returncode < 0
        is_consequence = last_words.is_consequence(text)
        if end.returncode == -signal.SIGABRT:
            # By transports that have lost a rank, whose process lets go of its devices yet. They don't always say so.
            is_consequence = is_consequence or self.output.has_raised(besides=worker.rank)
        return Failed(
            rank=worker.rank,
            local_rank=worker.local_rank,
            node_rank=self._group_rank,
            host=self._host,
            pid=worker.pid,
            returncode=end.returncode,
            ran_s=time.monotonic() - worker.started_s,
            last_lines=last_words.excerpt(text),
            log_file=self.output.log_file(worker),
            summary=last_words.summary(text) if has_raised else "",
            is_consequence=is_consequence,
            left_before=self._ranks_that_ended_well() if is_consequence and self._ended_well else "",
        )

    def _ranks_that_ended_well(self) -> str:
        from disttrain.flight_recorder.record.record import ranks_text  # only a job that fails needs it

        return ranks_text(sorted(self._workers[local_rank].rank for local_rank in self._ended_well))

    def _handle(self, event: Event) -> None:
        for command in self._supervision.handle(event):
            match command:
                case Send(number, with_children):
                    self._send(number, with_children=with_children)
                case AskForDumps(settle_s):
                    self._settled_s = time.monotonic() + settle_s
                    self._ask_for_dumps()
                case SetDeadline(after_s):
                    self._deadline_s = time.monotonic() + after_s
                case Tell(outcome):
                    self._link.ended(self.round, outcome)
                case SayAwaited(local_ranks):
                    self._say_awaited(local_ranks)
                case LeaveBehind():
                    self._running.clear()
                case End(outcome):
                    self._outcome = outcome
        self.output.is_ending = self._supervision.is_stopping

    def _send(self, number: int, *, with_children: bool) -> None:
        self._say_sent(number)
        is_notice = number == signal.SIGUSR1
        if is_notice or self._supervision.is_stopping:
            self._board.mark(NOTICED if is_notice or self._supervision.is_orderly else ENDING)
        # Where one rank asks, the others will: who does not hear it yet is left to find the mark.
        is_heard_later = number == signal.SIGTERM and self._supervision.is_orderly and self._board.is_asked()
        for local_rank in self._running:
            worker = self._workers[local_rank]
            if is_notice:
                # Who does not hear it yet finds the mark once it listens, and would die of the signal.
                heard = next((each for each in (number, signal.SIGTERM) if has_handler(worker.pid, each)), None)
                if heard is not None:
                    worker.send(heard, with_children=False)
                continue
            # Who saves before it ends still needs its children: loaders of data would die of the signal.
            is_alone = self._supervision.is_orderly and number != signal.SIGINT and has_handler(worker.pid, number)
            if is_alone or not is_heard_later:
                worker.send(number, with_children=with_children and not is_alone)

    def _ask_for_dumps(self) -> None:
        self._deadline_s = self._settled_s
        rings = ring_folder(self._environ)
        if not rings.is_dir():
            return
        from disttrain_launch.workers.dump_asking import DUMP_S, Dumping  # see there: a start does not wait for it

        sessions = {self._workers[local_rank].pid for local_rank in self._running}
        self._dumping = Dumping(rings, self.dump_folder, sessions)
        if self._dumping.is_over:
            return
        self._deadline_s = max(self._settled_s, time.monotonic() + DUMP_S)
        if self._dumping.fd is not None:
            self._selector.register(self._dumping.fd, selectors.EVENT_READ, self._dumping)

    def _end_dumping(self) -> None:
        if self._dumping is not None:
            if self._dumping.fd is not None and self._dumping.fd in self._selector.get_map():
                self._selector.unregister(self._dumping.fd)
            self._dumping.close()
            self._dumping = None

    def _collect_rings(self) -> None:
        rings = ring_folder(self._environ)
        if rings.is_dir():
            from disttrain_launch.workers.dump_asking import collect_rings  # as above

            collect_rings(rings, self.dump_folder)

    def _say_sent(self, number: int) -> None:
        count = len(self._running)
        again = "; again to kill them now" if number == signal.SIGINT else ""
        workers = f"{count} worker{'s' if count > 1 else ''} of this node"
        self.output.mention(f"{OPERATION}: {signal_name(number)} to {workers}{again}\n")

    def _say_awaited(self, local_ranks: frozenset[int]) -> None:
        ranks = ", ".join(str(self._workers[local_rank].rank) for local_rank in sorted(local_ranks))
        ended = f"a worker of this node ended {PATIENCE_S:g} s ago with exit code 0"
        self.output.say(f"{OPERATION}: {ended}; still waiting for rank{'s' if len(local_ranks) > 1 else ''} {ranks}\n")

    def _say_left(self, pids: list[int]) -> None:
        rank_of = {worker.pid: worker.rank for worker in self._workers.values()}
        for pid in pids:
            who = f"rank {rank_of[pid]} (pid {pid})" if pid in rank_of else f"pid {pid}"
            self.output.say(
                f"{OPERATION}: {who} is left behind: SIGKILL did not end it, its state is {state_of(pid)}. It goes "
                "when the kernel lets go of it; see what it waits for (a file system, a driver).\n"
            )
