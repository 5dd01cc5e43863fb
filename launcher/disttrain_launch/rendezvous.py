"""Nodes meet over the store: a shell around `rendezvous_state`.

Keys, under `launch/<round>/`: `arrivals` counts nodes that came, `arrival/<k>` is what the k-th says about itself,
`round` is node 0's answer to all (one small value, however many nodes), `member/<node_rank>` names the agent that got
the place, `absent` tells whom node 0 still waits for. So a round costs each node a handful of round trips and node 0
one per node.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from disttrain.errors import RendezvousError, StoreAuthError, StoreConnectionError, StoreTimeoutError
from disttrain.store import PrefixStore, TCPStore
from disttrain.store.base import Store
from disttrain_launch.job import OPERATION, JobSpec
from disttrain_launch.link import first_beat
from disttrain_launch.rendezvous_state import (
    Begin,
    Event,
    JoinTimeOver,
    Node,
    NodeCame,
    Refuse,
    Rendezvous,
    Round,
    Warn,
    name_nodes,
)

SAY_EVERY_S = 3.0
"""How often a waiting node says for whom."""
READ_REFUSAL_S = 3.0
MIN_ATTEMPT_S = 0.5
MIN_WAIT_S = 0.001

Say = Callable[[str], None]


@dataclass(frozen=True)
class Agreed:
    """What node 0 answers when all have come."""

    round: Round
    torch_port: int


def connect(spec: JobSpec, host: str, port: int, token: str | None, say: Say) -> TCPStore:
    """Reach node 0's store, trying until the join time is over. Raises RendezvousError."""
    where = f"{host}:{port}"
    until_s = time.monotonic() + spec.join_timeout_s
    while True:
        attempt_s = min(SAY_EVERY_S, max(until_s - time.monotonic(), MIN_ATTEMPT_S))
        try:
            return TCPStore(host, port, is_master=False, timeout=attempt_s, token=token)
        except StoreAuthError as error:
            problem = f"node 0's store at {where} and this node don't fit together: {error.problem}"
            remedy = "Every node needs the same --token-file, certificate authority and disttrain."
            raise RendezvousError(OPERATION, problem, remedy) from None
        except (StoreConnectionError, StoreTimeoutError) as error:
            left_s = until_s - time.monotonic()
            if left_s < MIN_ATTEMPT_S:
                raise RendezvousError(
                    OPERATION,
                    f"node 0 was not reached at {where} within {spec.join_timeout_s:g} s: {error.problem}",
                    "Is disttrain-launch running there with --node-rank 0, and does nothing block the port?",
                ) from None
            say(f"waiting for node 0 at {where} ({spec.join_timeout_s - left_s:.0f} s so far): {error.problem}")


def join(store: Store, node: Node, torch_port: int, join_timeout_s: float, say: Say) -> Agreed:
    """Take part in the first round. Raises RendezvousError on every node alike when there is none."""
    rooms = PrefixStore("launch/0", store)
    first_beat(rooms, node.node_rank)
    if node.node_rank == 0:
        return _lead(rooms, node, torch_port, join_timeout_s, say)
    return _follow(rooms, node, join_timeout_s, say)


def _lead(store: Store, node: Node, torch_port: int, join_timeout_s: float, say: Say) -> Agreed:
    machine = Rendezvous(node)
    num_came = 0
    for event in _events(store, node, machine, join_timeout_s, say):
        num_came += isinstance(event, NodeCame)
        for command in machine.handle(event):
            match command:
                case Begin(round, agents):
                    agreed = Agreed(round, torch_port)
                    members = [f"member/{node_rank}" for node_rank in range(len(agents))]
                    store.multi_set([*members, "round"], [*agents, json.dumps(asdict(agreed))])
                    return agreed
                case Refuse(problem, remedy):
                    _tell_refusal(store, problem, remedy, num_came)
                    raise RendezvousError(OPERATION, problem, remedy)
                case Warn(text):
                    say(text)
    raise AssertionError("the events end with JoinTimeOver, which ends the round")


def _events(store: Store, node: Node, machine: Rendezvous, join_timeout_s: float, say: Say) -> Iterator[Event]:
    """Arrivals as they come, node 0's first, until time is up; says meanwhile who is absent."""
    yield NodeCame(node)
    began_s = said_s = time.monotonic()
    until_s = began_s + join_timeout_s
    arrival = 1
    while (now_s := time.monotonic()) < until_s:
        if now_s - said_s >= SAY_EVERY_S:
            said_s = now_s
            absent = name_nodes(machine.absent)
            store.set("absent", absent)
            say(f"waiting for {absent} of {node.num_nodes} ({now_s - began_s:.0f} s so far)")
        if _comes(store, f"arrival/{arrival}", min(said_s + SAY_EVERY_S, until_s) - now_s):
            yield NodeCame(Node(**json.loads(store.get(f"arrival/{arrival}"))))
            arrival += 1
    yield JoinTimeOver(join_timeout_s)


def _tell_refusal(store: Store, problem: str, remedy: str, num_came: int) -> None:
    store.set("round", json.dumps({"problem": problem, "remedy": remedy, "num_came": num_came}))
    try:
        # This node's store ends with its launcher; whoever came shall have read why.
        store.barrier("refusal read", num_came, READ_REFUSAL_S)
    except StoreTimeoutError:
        pass


def _follow(store: Store, node: Node, join_timeout_s: float, say: Say) -> Agreed:
    began_s = time.monotonic()
    store.set(f"arrival/{store.add('arrivals', 1)}", json.dumps(asdict(node)))
    while not _comes(store, "round", SAY_EVERY_S):
        waited_s = time.monotonic() - began_s
        # Node 0 decides when time is up; this is for a node 0 that no longer does.
        if waited_s > join_timeout_s + 2 * SAY_EVERY_S:
            raise RendezvousError(OPERATION, f"node 0 decided nothing in {waited_s:.0f} s.", "See its output.")
        absent = store.get("absent").decode() if store.check(["absent"]) else "node 0"
        say(f"waiting for {absent} of {node.num_nodes} ({waited_s:.0f} s so far)")
    answer = json.loads(store.get("round"))
    if "problem" in answer:
        try:
            store.barrier("refusal read", answer["num_came"], READ_REFUSAL_S)
        except (StoreTimeoutError, StoreConnectionError):
            pass  # We have read it; node 0 has gone already.
        raise RendezvousError(OPERATION, answer["problem"], answer["remedy"])
    member = f"member/{node.node_rank}"
    if not store.check([member]) or store.get(member).decode() != node.agent:
        raise RendezvousError(
            OPERATION,
            f"the job began without this node: --node-rank {node.node_rank} was not free.",
            "Is it running twice? Each node needs a rank of its own, and jobs that share a host a port of their own.",
        )
    return Agreed(Round(**answer["round"]), answer["torch_port"])


def _comes(store: Store, key: str, wait_s: float) -> bool:
    try:
        store.wait([key], max(wait_s, MIN_WAIT_S))
    except StoreTimeoutError:
        return False
    return True
