"""One node's part of a job from start to end: what is made, in which order, and how it all goes again."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path

from disttrain import __version__, settings
from disttrain.errors import DisttrainError, LaunchError, StoreAddressError
from disttrain.store import (
    HashStore,
    ServerProcess,
    Store,
    TCPStore,
    read_token,
    spawn_server,
    write_token,
)
from disttrain.store.standby.elector import Elector
from disttrain_launch.output.event_log import EventLog
from disttrain_launch.output.events import Record, cause_of
from disttrain_launch.output.fates import fates
from disttrain_launch.output.report import ending
from disttrain_launch.output.screen import Outlet
from disttrain_launch.output.telling import Connect, Telling
from disttrain_launch.output.view import JobState
from disttrain_launch.rendezvous.leading import first_leader, has_standby, successor
from disttrain_launch.rendezvous.link import JobLink
from disttrain_launch.rendezvous.node0 import Leader, Say, connect
from disttrain_launch.rendezvous.part import take_part
from disttrain_launch.rendezvous.rounds import Node
from disttrain_launch.rendezvous.standby import Standby
from disttrain_launch.rendezvous.sweeping import Sweeper
from disttrain_launch.request.addresses import LOOPBACK, is_loopback, is_ours
from disttrain_launch.request.handed_token import STDIN, read_handed_token
from disttrain_launch.request.job import NOT_STARTED, OPERATION, JobSpec
from disttrain_launch.request.whereabouts import Address, leave_note
from disttrain_launch.workers.agent import Agent
from disttrain_launch.workers.board import Board
from disttrain_launch.workers.dumps import dump_folder, ring_folder, with_dump_folder
from disttrain_launch.workers.environment import Meeting
from disttrain_launch.workers.outcome import Interrupted, Outcome, signal_name
from disttrain_launch.workers.signals import SignalPipe, SignalStop
from disttrain_launch.workers.warden import Warden

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  what we make there is new, and ours alone

_LEAVE_S = 2.0
"""How long a node that goes before the end waits for node 0's answer."""

_SUCCESSION_S = 10.0
"""How much longer a node bears with a store that does not answer where a standby may be about to take its place."""

_SAY_MS = 1000

_LINGER_S = 1.0
"""How long the store serves peers after this node has left: they may still be reading that it is over."""


Leads = Callable[[], Leader | None]
"""Who leads the job on this node, as far as that is known when it is called."""


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
                meeting, link, leads, connect = _meet(spec, cleanup, folder, name, host)
                cleanup.callback(_join, leads)
                board = Board(folder, spec.num_local_workers)
                agent = Agent(
                    spec,
                    name=name,
                    host=host,
                    environ=environ,
                    meeting=meeting,
                    signals=signals,
                    warden=warden,
                    link=link,
                    board=board,
                    has_table=leads() is not None,
                )
                telling = Telling(connect, name, board, lambda: _job_of(leads()), agent.feed)
                telling.start()
                cleanup.callback(telling.stop)
                return _take_part(spec, agent, link, leads, signals, environ, host, folder)
            finally:
                signals.interrupts = False  # What follows is the clean-up.
        except SignalStop as stop:
            _say(f"stopped by {signal_name(stop.number)}.")
            return 128 + stop.number


def _take_part(
    spec: JobSpec,
    agent: Agent,
    link: JobLink,
    leads: Leads,
    signals: SignalPipe,
    environ: Mapping[str, str],
    host: str,
    folder: Path,
) -> int:
    started_s = time.time()

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
        _hear_the_end(link, _patience_s(spec, leads()))
        _log_end(leads(), interrupted.exit_code, cause_of(interrupted))
        raise
    except (DisttrainError, OSError) as error:
        agent.output.show_held_back()
        _hear_the_end(link, _patience_s(spec, leads()))
        _log_end(leads(), NOT_STARTED, {"kind": "not started", "reason": str(error)})
        raise
    leader = leads()
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
    told = fates(done.outcome, agent.output, agent.stopped_ranks, is_told_elsewhere=leader is None)
    agent.output.say(told + ending(done.outcome, spec, done.note, is_told_elsewhere=leader is None) + why)
    # Who told us to stop does not wait for a reader.
    agent.output.flush(_SAY_MS if isinstance(done.outcome, Interrupted) else None)
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
    from disttrain_launch.output.dump_story import story  # see there: a start does not wait for it

    report = story(dumps, own_folder, others, outcome, spec, started_s, is_over=is_over)
    return report.text, report.facts


def _keep_rings(environ: Mapping[str, str]) -> None:
    """Keeps the rings that workers left, where the agent was killed and nobody knows the round."""
    if (rings := ring_folder(environ)).is_dir():
        from disttrain.flight_recorder.dumps.orphaned_rings import (
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


def _join(leads: Leads) -> None:
    if (leader := leads()) is not None:
        leader.join()


def _job_of(leader: Leader | None) -> JobState | None:
    return None if leader is None else leader.job


def _patience_s(spec: JobSpec, leader: Leader | None) -> float:
    # The others' store goes with this node where it leads: they stop their workers first.
    return _LEAVE_S if leader is None else _LEAVE_S + spec.shutdown_timeout_s


def _hear_the_end(link: JobLink, patience_s: float) -> None:
    """This node goes; node 0 has a moment to take note, so that the others don't have to miss it."""
    link.wait_for_end(patience_s)
    link.leave()


def _meet(
    spec: JobSpec, cleanup: ExitStack, folder: Path, agent: str, host: str
) -> tuple[Meeting, JobLink, Leads, Connect]:
    """Start or find the job's store and meet the other nodes there; `cleanup` lets go of it.

    Returns also who leads the job on this node, if anybody does by then, and how to reach the store into which others
    look.
    """
    say = _sayer(spec)
    token_file, token = _token(spec, folder)
    store_addr, store_port = spec.master_addr, spec.master_port
    server = _serve(spec, token)
    if server is not None:
        cleanup.callback(server.close)
        # This node's own way to it, whatever others call it.
        store_addr, store_port = server.host if is_loopback(server.host) else LOOPBACK, server.port
    store: Store
    # Where nobody else takes part the workers' store need not be asked.
    store = connect(spec, store_addr, store_port, token, say) if spec.num_nodes > 1 else HashStore()
    cleanup.callback(store.close)
    if isinstance(store, TCPStore) and has_standby(spec):
        elector = Elector(store)
        elector.start()
        cleanup.callback(elector.close)
    node = _node(spec, agent, host)

    def reach() -> AbstractContextManager[Store]:
        if spec.num_nodes > 1:
            return nullcontext(store)
        return closing(TCPStore(store_addr, store_port, is_master=False, token=token))

    begun = Sweeper(reach).begun
    server_fd = None
    if server is not None and spec.num_nodes == 1:
        server_fd = os.pidfd_open(server.pid)
        cleanup.callback(os.close, server_fd)
    leader = standby = None
    if server is not None:
        events = EventLog(spec.logs.event_file)
        cleanup.callback(events.close)
        leader = first_leader(spec, store, node, events.write, say, begun)
        leader.log("job_started", **_about(spec, node))
        leader.start()
    elif isinstance(store, TCPStore) and has_standby(spec):
        standby = Standby(spec, store, agent, token, successor(spec, store, node, say, begun), say)
        standby.start()
        cleanup.callback(standby.close)

    def leads() -> Leader | None:
        return leader if standby is None else standby.leader

    where = f"{spec.master_addr}:{store_port}"
    max_missed_beats = spec.max_missed_beats + (math.ceil(_SUCCESSION_S / spec.beat_s) if has_standby(spec) else 0)
    link = JobLink(store, where, node, beat_s=spec.beat_s, max_missed_beats=max_missed_beats)
    addresses = (lambda: store.addresses) if isinstance(store, TCPStore) else None
    meeting = Meeting(store_addr, store_port, token_file, spec.master_addr, addresses, server_fd)
    leave_note(folder, Address(meeting.endpoint, str(token_file.absolute()) if token_file is not None else ""))
    return meeting, link, leads, reach


def _token(spec: JobSpec, folder: Path) -> tuple[Path | None, str | None]:
    if spec.token_file == STDIN:
        return folder / "token", write_token(folder / "token", read_handed_token(spec.join_timeout_s))
    if spec.token_file is not None:
        return spec.token_file, read_token(spec.token_file)
    if spec.num_nodes > 1:
        return None, None
    return folder / "token", write_token(folder / "token")


def _serve(spec: JobSpec, token: str | None) -> ServerProcess | None:
    """The store's server, where it is for this node to start it; None where another does."""
    is_called = spec.node_rank is None
    if spec.node_rank not in (0, None) or (is_called and not is_ours(spec.master_addr)):
        return None
    listen_addr = "" if spec.num_nodes > 1 else LOOPBACK
    if is_loopback(spec.master_addr):
        listen_addr = spec.master_addr
    try:
        return spawn_server(listen_addr, spec.master_port, token, linger_s=_LINGER_S)
    except StoreAddressError as error:
        if is_called:
            return None  # Another launcher on this machine was first.
        where = f"{listen_addr or '*'}:{spec.master_port}"
        raise LaunchError(OPERATION, f"the store cannot listen on {where}: {error.problem}", error.remedy) from None


def _node(spec: JobSpec, agent: str, host: str) -> Node:
    terms = spec.terms
    return Node(
        agent=agent,
        node_rank=spec.node_rank,
        num_nodes=f"{terms.min_nodes}:{terms.max_nodes}" if terms.is_elastic else str(terms.max_nodes),
        num_local_workers=spec.num_local_workers,
        version=__version__,
        run_id=spec.run_id,
        digest=spec.digest,
        host=host,
        keep_alive=f"{spec.beat_s:g} s and {spec.max_missed_beats}",
        stop_s=spec.stop_s,
    )


def _about(spec: JobSpec, node: Node) -> dict[str, str | int]:
    """The job's facts for the event log: not its arguments, since there may be secrets in them."""
    return {
        "job": spec.run_id,
        "version": node.version,
        "nodes": node.num_nodes,
        "max_restarts": spec.max_restarts,
        "host": node.host,
        "pid": os.getpid(),
    }


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
    return (lambda text: None) if spec.logs.is_quiet else _say


def _say(text: str) -> None:
    sys.stderr.flush()
    with closing(Outlet(2)) as outlet:
        outlet.put(f"{OPERATION}: {text}\n".encode("utf-8", "replace"))
        # A terminal that nobody reads must keep nobody, least of all who was told to stop.
        outlet.flush(_SAY_MS)
