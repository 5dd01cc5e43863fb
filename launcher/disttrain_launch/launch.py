"""One node's part of a job from start to end: what is made, in which order, and how it all goes again."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from disttrain import settings
from disttrain.errors import DisttrainError, LaunchError
from disttrain_launch.output.events import Record, cause_of
from disttrain_launch.output.failure.fates import fates
from disttrain_launch.output.failure.report import ending
from disttrain_launch.output.publishing import Telling
from disttrain_launch.output.terminal.screen import SAY_MS, say
from disttrain_launch.output.view import JobState
from disttrain_launch.rendezvous.node0 import Leader, Say
from disttrain_launch.rendezvous.part import take_part
from disttrain_launch.request.job import NOT_STARTED, OPERATION, JobSpec
from disttrain_launch.session import Session
from disttrain_launch.workers.agent import Agent
from disttrain_launch.workers.board import Board
from disttrain_launch.workers.dumps import dump_folder, ring_folder, with_dump_folder
from disttrain_launch.workers.outcome import Interrupted, Outcome, signal_name
from disttrain_launch.workers.signals import SignalPipe, SignalStop
from disttrain_launch.workers.warden import Warden

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  what we make there is new, and ours alone

_LEAVE_S = 2.0
"""The time that a node which leaves before the end waits for node 0's answer."""


def run(spec: JobSpec) -> int:
    """Run this node's part and return the launcher's exit code. Raises DisttrainError when it does not start."""
    _hold_standard_fds()
    environ = settings.environment()
    outer = settings.AGENT.read(environ)
    # A launcher inside a worker keeps the outer agent's name, so that the outer one finds its workers too.
    name = f"{outer}/{secrets.token_hex(8)}" if outer else secrets.token_hex(8)
    with ExitStack() as cleanup:
        # The warden knows the folders before they are made, so that no moment is left in which one could stay behind.
        folder = Path(_temporary_directory(), f"disttrain-{secrets.token_hex(8)}")
        # For what shall outlive workers in memory, such as copies of saves.
        memory = _SHARED_MEMORY / f"{folder.name}-memory"  # TMPDIR may lie there, too
        folders = [folder, memory] if os.access(_SHARED_MEMORY, os.W_OK) else [folder]
        environ = with_dump_folder(environ, spec, folder, memory if memory in folders else folder)
        warden = Warden(name, folders, spec.stop_grace_s, partial(_keep_rings, environ))
        cleanup.callback(warden.close)
        for made in folders:
            made.mkdir(mode=0o700)
            cleanup.callback(shutil.rmtree, made, ignore_errors=True)
        if memory in folders:
            environ[settings.MEMORY_DIR.name] = str(memory)
        signals = cleanup.enter_context(SignalPipe())
        try:
            try:
                host = socket.gethostname()
                session = Session(spec, folder, name, host, _sayer(spec))
                cleanup.callback(session.close)
                session.open()
                board = Board(folder, spec.num_local_workers)
                agent = Agent(
                    spec,
                    name=name,
                    host=host,
                    environ=environ,
                    meeting=session.meeting,
                    signals=signals,
                    warden=warden,
                    link=session.link,
                    board=board,
                    has_table=session.leader is not None,
                )
                telling = Telling(session.reach, name, board, lambda: _job_of(session.leader), agent.feed)
                telling.start()
                cleanup.callback(telling.stop)
                return _take_part(spec, agent, session, signals, environ, host, folder)
            finally:
                signals.interrupts = False  # What follows is the clean-up.
        except SignalStop as stop:
            say(f"stopped by {signal_name(stop.number)}.")
            return 128 + stop.number


def _take_part(
    spec: JobSpec,
    agent: Agent,
    session: Session,
    signals: SignalPipe,
    environ: Mapping[str, str],
    host: str,
    folder: Path,
) -> int:
    started_s, link = time.time(), session.link

    def explain(round: int, outcome: Outcome) -> str:
        dumps = dump_folder(environ, round)
        return _story(dumps, folder, link.take_dumps(round), outcome, spec, started_s, is_over=False)[0]

    try:
        done = take_part(spec, agent, link, signals, _sayer(spec), explain)
    except SignalStop as stop:
        # It came between rounds, or while workers were being started.
        agent.output.show_held_back()
        interrupted = Interrupted(stop.number, spec.node_rank or 0, host)
        link.ended(agent.round, interrupted)
        link.stopped(agent.round)
        _hear_the_end(session, spec)
        _log_end(session.leader, interrupted.exit_code, cause_of(interrupted))
        raise
    except (DisttrainError, OSError) as error:
        agent.output.show_held_back()
        _hear_the_end(session, spec)
        _log_end(session.leader, NOT_STARTED, {"kind": "not started", "reason": str(error)})
        raise
    leader = session.leader
    dumps = dump_folder(environ, max(agent.round, 0))
    # Dumps in a folder that the user named are there for node 0 as well, or are kept there.
    has_story = leader is not None or (folder in dumps.parents and not link.has_sent_dumps)
    agent.explanations.finish(agent.output)
    why: str = ""
    facts: Mapping[str, object] = {}
    if has_story:
        others = [] if leader is None else link.take_dumps(agent.round)
        why, facts = _story(dumps, folder, others, done.outcome, spec, started_s, is_over=True)
    _log_end(leader, done.outcome.exit_code, cause_of(done.outcome), verdict=facts)
    lines = fates(done.outcome, agent.output, agent.stopped_ranks, is_told_elsewhere=leader is None)
    agent.output.say(lines + ending(done.outcome, spec, done.note, is_told_elsewhere=leader is None) + why)
    # Who told us to stop does not wait for a reader.
    agent.output.flush(SAY_MS if isinstance(done.outcome, Interrupted) else None)
    link.leave()
    return done.outcome.exit_code


def _story(
    dumps: Path,
    own_folder: Path,
    others: Sequence[bytes],
    outcome: Outcome,
    spec: JobSpec,
    started_s: float,
    *,
    is_over: bool,
) -> tuple[str, Mapping[str, object]]:
    if not others and not dumps.is_dir():
        return "", {}
    from disttrain_launch.output.failure.dump_story import story  # see there: a start does not wait for it

    report = story(dumps, own_folder, others, outcome, spec, started_s, is_over=is_over)
    return report.text, report.facts


def _keep_rings(environ: Mapping[str, str]) -> None:
    """Keeps the rings that workers left, where the agent was killed and nobody knows the round."""
    if (rings := ring_folder(environ)).is_dir():
        from disttrain.flight_recorder.dumps.rings.orphaned_rings import (
            collect_linked,  # only the warden of a killed agent needs it
        )

        collect_linked(rings, dump_folder(environ, 0))


def _log_end(leader: Leader | None, exit_code: int, cause: Record, verdict: Mapping[str, object] | None = None) -> None:
    """The last records of the event log; `leader` None: another node writes it."""
    if leader is None:
        return
    if verdict:
        leader.log("verdict", **verdict)
    leader.log("job_ended", exit_code=exit_code, cause=cause)


def _job_of(leader: Leader | None) -> JobState | None:
    return None if leader is None else leader.job


def _hear_the_end(session: Session, spec: JobSpec) -> None:
    """This node goes; node 0 has a moment to take note, so that the others don't have to miss it."""
    # The others' store goes with this node where it leads: they stop their workers first.
    session.link.wait_for_end(_LEAVE_S if session.leader is None else _LEAVE_S + spec.shutdown_timeout_s)
    session.link.leave()


def _temporary_directory() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise LaunchError(OPERATION, "there is no folder for temporary files.", "Set TMPDIR to one.") from None


def _hold_standard_fds() -> None:
    """Whoever started us may have closed some of 0, 1 and 2; then a pipe would take the number, and get our output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _sayer(spec: JobSpec) -> Say:
    """The function by which the launcher tells what is no failure."""
    return (lambda text: None) if spec.logs.is_quiet else say
