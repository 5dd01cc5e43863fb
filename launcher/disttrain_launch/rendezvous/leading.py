"""Makes the leader of a job: on node 0 for a start, and on the node that takes its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from disttrain.errors import LaunchError
from disttrain.store import PrefixStore, Store, TCPStore
from disttrain_launch.output.event_log import EventLog
from disttrain_launch.output.events import Chronicle, Record
from disttrain_launch.output.view import JobState
from disttrain_launch.rendezvous.inherited import Inherited
from disttrain_launch.rendezvous.lease import Lease, last_formed, told_by
from disttrain_launch.rendezvous.node0 import ROOM, Leader, Say
from disttrain_launch.rendezvous.rounds import Node
from disttrain_launch.rendezvous.state import Rendezvous
from disttrain_launch.request.job import JobSpec

Write = Callable[[Iterable[Record]], None]
Begun = Callable[[int, list[str]], None]


def first_leader(spec: JobSpec, store: Store, node: Node, write: Write, say: Say, begun: Begun) -> Leader:
    """Of a job that begins; `write` keeps what happens, `begun` is told of each round."""
    machine = Rendezvous(spec.terms, node, time.monotonic())
    return _leader(spec, store, machine, _chronicle(spec), node, write, say, begun)


def successor(spec: JobSpec, store: Store, node: Node, say: Say, begun: Begun) -> Callable[[str, str], Leader]:
    """Makes the leader that `node` is when the agent named is lost; the address is that of rank 0 from then on."""

    def lead(lost: str, torch_addr: str) -> Leader:
        room = PrefixStore(ROOM, store)
        last_words, formed = told_by(room), last_formed(room)
        machine = Inherited(spec.terms, node, time.monotonic(), lost, last_words, formed)
        chronicle = _chronicle(spec)
        chronicle.take_over(
            (last_words[agent][0] for agent in [*machine.everyone, lost] if agent in last_words), machine.gone, formed
        )
        try:
            events = EventLog(spec.logs.event_file)
        except LaunchError as error:
            say(str(error))  # The job is worth more than its log.
            events = EventLog(None)
        leader = _leader(spec, store, machine, chronicle, node, events.write, say, begun, torch_addr)
        leader.log("node_0_replaced", host=node.host)
        return leader

    return lead


def has_standby(spec: JobSpec) -> bool:
    """True when another node keeps a standby of the store, and may take node 0's place."""
    return spec.has_standby and spec.terms.is_elastic


def _chronicle(spec: JobSpec) -> Chronicle:
    return Chronicle(JobState(spec.run_id, time.time(), spec.max_restarts))


def _leader(
    spec: JobSpec,
    store: Store,
    machine: Rendezvous,
    chronicle: Chronicle,
    node: Node,
    write: Write,
    say: Say,
    begun: Begun,
    torch_addr: str = "",
) -> Leader:
    lease = None
    if isinstance(store, TCPStore) and has_standby(spec):
        lease = Lease(PrefixStore(ROOM, store), node.agent, lambda: store.addresses[0], spec.terms.keep_alive_s)
    return Leader(
        store,
        machine,
        chronicle,
        write,
        beat_s=spec.beat_s,
        close_s=spec.close_s,
        say=say,
        begun=begun,
        lease=lease,
        torch_addr=torch_addr,
    )
