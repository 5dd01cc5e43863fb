"""One node's part of a job from start to end: what is made, in which order, and how it all goes again."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from disttrain import __version__, settings
from disttrain.errors import LaunchError, StoreAddressError
from disttrain.store import ServerProcess, read_token, spawn_server, write_token
from disttrain_launch.addresses import LOOPBACK, free_port, is_loopback
from disttrain_launch.agent import Agent
from disttrain_launch.dumps import DUMP_S, dump_folder, story, with_dump_folder
from disttrain_launch.environment import Meeting
from disttrain_launch.handed_token import STDIN, read_handed_token
from disttrain_launch.job import OPERATION, JobSpec
from disttrain_launch.link import JobLink
from disttrain_launch.outcome import Interrupted, Outcome, signal_name
from disttrain_launch.rendezvous import Agreed, connect, join
from disttrain_launch.rendezvous_state import Node, Place, Round
from disttrain_launch.report import ending
from disttrain_launch.signals import SignalPipe, SignalStop
from disttrain_launch.warden import Warden

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  what we make there is new, and ours alone

_LEAVE_S = 3.0
"""How long nodes wait for each other at the end, beyond the time that workers are given to stop."""

_LINGER_S = 1.0
"""How long the store serves peers after this node has left: they may still be reading that it is over."""


def run(spec: JobSpec) -> int:
    """Run this node's part and return the launcher's exit code. Raises DisttrainError when it does not start."""
    _hold_standard_fds()
    environ = settings.environment()
    outer = settings.AGENT.read(environ)
    started_s = time.time()
    # A launcher inside a worker keeps the outer agent's name, so that the outer one finds its workers too.
    name = f"{outer}/{secrets.token_hex(8)}" if outer else secrets.token_hex(8)
    with ExitStack() as cleanup:
        # The warden knows the folders before they are made, so that no moment is left in which one could stay behind.
        folder = Path(_temporary_directory(), f"disttrain-{secrets.token_hex(8)}")
        # For what shall outlive workers in memory, such as copies of saves.
        memory = _SHARED_MEMORY / folder.name
        folders = [folder, memory] if os.access(_SHARED_MEMORY, os.W_OK) else [folder]
        warden = Warden(name, folders, spec.stop_grace_s)
        cleanup.callback(warden.close)
        for made in folders:
            made.mkdir(mode=0o700)
            cleanup.callback(shutil.rmtree, made, ignore_errors=True)
        environ = with_dump_folder(environ, spec, folder)
        if memory in folders:
            environ[settings.MEMORY_DIR.name] = str(memory)
        signals = cleanup.enter_context(SignalPipe())
        try:
            try:
                host = socket.gethostname()
                place, meeting, link = _meet(spec, cleanup, folder, name, host)
                agent = Agent(spec, name=name, host=host, environ=environ, signals=signals, warden=warden, link=link)
                outcome = agent.run(place, meeting)
                signals.interrupts = True
                if link is not None:
                    outcome = link.leave(outcome, _wait_for_peers_s(spec, outcome))
                why = story(dump_folder(environ), folder, outcome, spec, started_s)
                agent.output.say(ending(outcome, spec) + why)
                agent.output.flush()
                return outcome.exit_code
            finally:
                signals.interrupts = False  # What follows is the clean-up.
        except SignalStop as stop:
            _say(f"stopped by {signal_name(stop.number)}.")
            return 128 + stop.number


def _wait_for_peers_s(spec: JobSpec, outcome: Outcome) -> float:
    grace_s = spec.shutdown_timeout_s if isinstance(outcome, Interrupted) else spec.stop_grace_s
    return DUMP_S + grace_s + _LEAVE_S


def _meet(
    spec: JobSpec, cleanup: ExitStack, folder: Path, agent: str, host: str
) -> tuple[Place, Meeting, JobLink | None]:
    """Start or find the job's store and meet the other nodes there; `cleanup` lets go of it."""
    token_file, token = _token(spec, folder)
    store_addr, store_port, torch_port = spec.master_addr, spec.master_port, 0
    if spec.node_rank == 0:
        server = _serve(spec, token)
        cleanup.callback(server.close)
        # This node's own way to it, whatever others call it.
        store_addr, store_port = server.host if is_loopback(server.host) else LOOPBACK, server.port
        torch_port = free_port()
    agreed = Agreed(Round(0, spec.num_nodes, spec.num_local_workers), torch_port)
    link = None
    if spec.num_nodes > 1:
        store = connect(spec, store_addr, store_port, token, _say)
        cleanup.callback(store.close)
        agreed = join(store, _node(spec, agent, host), torch_port, spec.join_timeout_s, _say)
        link = JobLink(store, f"{spec.master_addr}:{store_port}", spec.node_rank, spec.num_nodes)
    meeting = Meeting(store_addr, store_port, token_file, spec.master_addr, agreed.torch_port)
    return agreed.round.place(spec.node_rank), meeting, link


def _token(spec: JobSpec, folder: Path) -> tuple[Path | None, str | None]:
    if spec.token_file == STDIN:
        return folder / "token", write_token(folder / "token", read_handed_token(spec.join_timeout_s))
    if spec.token_file is not None:
        return spec.token_file, read_token(spec.token_file)
    if spec.num_nodes > 1:
        return None, None
    return folder / "token", write_token(folder / "token")


def _serve(spec: JobSpec, token: str | None) -> ServerProcess:
    listen_addr = "" if spec.num_nodes > 1 else LOOPBACK
    if is_loopback(spec.master_addr):
        listen_addr = spec.master_addr
    try:
        return spawn_server(listen_addr, spec.master_port, token, linger_s=_LINGER_S)
    except StoreAddressError as error:
        where = f"{listen_addr or '*'}:{spec.master_port}"
        raise LaunchError(OPERATION, f"the store cannot listen on {where}: {error.problem}", error.remedy) from None


def _node(spec: JobSpec, agent: str, host: str) -> Node:
    return Node(
        node_rank=spec.node_rank,
        num_nodes=spec.num_nodes,
        num_local_workers=spec.num_local_workers,
        version=__version__,
        run_id=spec.run_id,
        digest=spec.digest,
        host=host,
        agent=agent,
    )


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


def _say(text: str) -> None:
    print(f"{OPERATION}: {text}", file=sys.stderr, flush=True)
