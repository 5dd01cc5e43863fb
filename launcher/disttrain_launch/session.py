"""A node's session with its job: the store, the link to the other nodes, and the leader where it is on this node."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from uuid import uuid4

from disttrain import __version__
from disttrain.errors import LaunchError, StoreAddressError
from disttrain.store import (
    HashStore,
    ServerProcess,
    Store,
    TCPStore,
    read_token,
    spawn_server,
    write_token,
)
from disttrain.store.connection.addresses import LOOPBACK_REMEDY, UNIX, is_loopback_down
from disttrain.store.protocol.wire import Address as StoreAddress
from disttrain.store.proxy.address import UpstreamAddress
from disttrain.store.standby.elector import Elector
from disttrain_launch.output.event_log import EventLog
from disttrain_launch.rendezvous.leading import first_leader, has_standby, successor
from disttrain_launch.rendezvous.link import JobLink
from disttrain_launch.rendezvous.node0 import Leader, Say, connect
from disttrain_launch.rendezvous.rounds import Node
from disttrain_launch.rendezvous.standby import Standby
from disttrain_launch.rendezvous.sweeping import Sweeper
from disttrain_launch.request.addresses import LOOPBACK, is_loopback, is_ours
from disttrain_launch.request.handed_token import STDIN, read_handed_token
from disttrain_launch.request.job import OPERATION, JobSpec
from disttrain_launch.request.whereabouts import Address, leave_note
from disttrain_launch.workers.environment import Meeting

_SUCCESSION_S = 10.0
"""The additional time that a node waits for a silent store if a standby may be about to take its place."""

_LINGER_S = 1.0
"""The time that the store serves peers after this node has left: they may still be reading that it is over."""


class Session:
    """Starts or finds the job's store, and meets the other nodes there.

    Args: folder  this agent's own: it gets the token, and a note of where the store is;  agent  its name.

    Once it is open, `meeting` says where workers find the store, and `link` leads to node 0. Whoever makes a session
    closes it, also one that could not be opened.
    """

    meeting: Meeting
    link: JobLink

    def __init__(self, spec: JobSpec, folder: Path, agent: str, host: str, say: Say) -> None:
        self._spec = spec
        self._folder = folder
        self._node = _node(spec, agent, host)
        self._say = say
        self._address = spec.master_addr, spec.master_port
        self._token: str | None = None
        self._leader: Leader | None = None
        self._standby: Standby | None = None
        self._cleanup = ExitStack()

    @property
    def leader(self) -> Leader | None:
        """The job's leader where it is on this node, as far as that is known: a standby's node may come to lead."""
        return self._leader if self._standby is None else self._standby.leader

    def open(self) -> None:
        """Raises: DisttrainError when there is no store, or the job does not take this node."""
        spec, cleanup = self._spec, self._cleanup
        token_file, self._token = _token(spec, self._folder)
        server = _serve(spec, self._token)
        if server is not None:
            cleanup.callback(server.close)
            # This node's own way to it, whatever others call it.
            self._address = server.host if is_loopback(server.host) else LOOPBACK, server.port
        # Where nobody else takes part the workers' store need not be asked.
        if spec.num_nodes > 1:
            self._store: Store = connect(spec, *self._address, self._token, self._say)
        else:
            self._store = HashStore()
        cleanup.callback(self._store.close)
        if isinstance(self._store, TCPStore) and has_standby(spec):
            elector = Elector(self._store)
            elector.start()
            cleanup.callback(elector.close)
        server_fd = None
        if server is not None and spec.num_nodes == 1:
            server_fd = os.pidfd_open(server.pid)
            cleanup.callback(os.close, server_fd)
        if server is not None:
            self._lead()
        elif isinstance(self._store, TCPStore) and has_standby(spec):
            self._stand_by(self._store)
        self._open_link(token_file, server_fd, self._open_proxy())
        cleanup.callback(self._join)

    def reach(self) -> AbstractContextManager[Store]:
        """The store that workers use, into which others look too. Where this node is the only one, that is not the
        store of the rendezvous, which needs no server."""
        if self._spec.num_nodes > 1:
            return nullcontext(self._store)
        return closing(TCPStore(*self._address, is_master=False, token=self._token))

    def close(self) -> None:
        """Waits until the leader, where it is here, has said how the job ended; then lets go of all that is open."""
        self._cleanup.close()

    def _lead(self) -> None:
        spec = self._spec
        events = EventLog(spec.logs.event_file)
        self._cleanup.callback(events.close)
        begun = Sweeper(self.reach).begun
        self._leader = first_leader(spec, self._store, self._node, events.write, self._say, begun)
        self._leader.log("job_started", **_about(spec, self._node))
        self._leader.start()

    def _stand_by(self, store: TCPStore) -> None:
        lead = successor(self._spec, store, self._node, self._say, Sweeper(self.reach).begun)
        self._standby = Standby(self._spec, store, self._node.agent, self._token, lead, self._say)
        self._standby.start()
        self._cleanup.callback(self._standby.close)

    def _open_proxy(self) -> Callable[[], StoreAddress | None] | None:
        """Workers' way to the store on this node; None: they go there themselves."""
        spec, store = self._spec, self._store
        if not (spec.has_store_proxy and spec.num_nodes > 1 and spec.num_local_workers > 1):
            return None
        if not isinstance(store, TCPStore):
            return None
        address, standby = store.addresses
        upstream = UpstreamAddress(*address, standby)
        # A name that nobody guesses: another's would not know the token, but could keep workers from their store.
        proxy = spawn_server(f"{UNIX}disttrain-{uuid4().hex}", 0, self._token, linger_s=_LINGER_S, upstream=upstream)
        self._cleanup.callback(proxy.close)
        # One that has ended, as when its server was gone for a while, is of no use to the next round.
        return lambda: (proxy.host, proxy.port) if proxy.is_running else None

    def _open_link(
        self, token_file: Path | None, server_fd: int | None, proxy: Callable[[], StoreAddress | None] | None
    ) -> None:
        spec, store, (addr, port) = self._spec, self._store, self._address
        max_missed_beats = spec.max_missed_beats + (math.ceil(_SUCCESSION_S / spec.beat_s) if has_standby(spec) else 0)
        where = f"{spec.master_addr}:{port}"
        self.link = JobLink(store, where, self._node, beat_s=spec.beat_s, max_missed_beats=max_missed_beats)
        addresses = (lambda: store.addresses) if isinstance(store, TCPStore) else None
        self.meeting = Meeting(addr, port, token_file, spec.master_addr, addresses, server_fd, proxy)
        token_path = "" if token_file is None else str(token_file.absolute())
        leave_note(self._folder, Address(self.meeting.endpoint, token_path))

    def _join(self) -> None:
        if (leader := self.leader) is not None:
            leader.join()


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
    if is_loopback_down(spec.master_addr):
        problem = f"nobody can reach {spec.master_addr}: this machine's loopback interface is down."
        raise LaunchError(OPERATION, problem, LOOPBACK_REMEDY)
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
