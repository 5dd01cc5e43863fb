"""Node 0's lease: one has it, who loses it learns so in time, and the standby is on a node that can keep it."""

from __future__ import annotations

import pytest

from disttrain.store import HashStore
from disttrain_launch.rendezvous.lease import FORMED, LEADER, STANDBY, Lease, SupersededError, last_formed, told_by
from disttrain_launch.rendezvous.messages import Came, Formed, Run, Stop, Wait, encode
from disttrain_launch.rendezvous.rounds import Assignment, Node
from disttrain_launch.workers.outcome import Changed


def test_who_is_superseded_learns_so_before_it_speaks() -> None:
    store = HashStore()
    lease = Lease(store, "a", lambda: ("here", 1), keep_alive_s=0.0)
    lease.check()
    assert store.compare_set(LEADER, "a", "b") == b"b"
    with pytest.raises(SupersededError, match="another leads the job"):
        lease.check()


def test_a_seat_that_was_looked_at_just_now_is_not_looked_at_again() -> None:
    store = HashStore()
    lease = Lease(store, "a", lambda: ("here", 1), keep_alive_s=100.0)
    store.set(LEADER, "b")
    lease.check()


def test_the_standby_stays_where_it_is_while_it_can() -> None:
    store = HashStore()
    home = ("here", 1)
    lease = Lease(store, "a", lambda: home, keep_alive_s=8.0)
    lease.choose_standby([])
    assert not store.check([STANDBY])
    lease.choose_standby(["b", "c"])
    assert store.get(STANDBY) == b"b"
    lease.choose_standby(["c", "b"])
    assert store.get(STANDBY) == b"b"
    lease.choose_standby(["c"])
    assert store.get(STANDBY) == b"c"
    lease.choose_standby([])
    assert store.get(STANDBY) == b""


def test_whose_standby_became_the_store_keeps_no_other() -> None:
    store = HashStore()
    home = ("here", 1)
    lease = Lease(store, "a", lambda: home, keep_alive_s=8.0)
    lease.choose_standby(["b", "c"])
    home = ("there", 2)
    lease.choose_standby(["b", "c"])
    assert store.get(STANDBY) == b"c"


def test_a_successor_knows_what_the_others_were_told() -> None:
    store = HashStore()
    nodes = {agent: Node(agent, rank) for rank, agent in enumerate("abc")}
    words = {"a": Run(Assignment(3, 0, 0, 2, 4), 1), "b": Stop(3, Changed("a node came"))}
    for agent, node in nodes.items():
        store.set(f"node/{agent}", encode(Came(node)))
    for agent, word in words.items():
        store.set(f"word/{agent}", encode(word))
    store.set("word/stranger", encode(Wait("for nothing")))
    assert told_by(store) == {"a": (nodes["a"], words["a"]), "b": (nodes["b"], words["b"]), "c": (nodes["c"], None)}
    assert last_formed(store) is None
    store.set(FORMED, encode(Formed(3, 1, ["a", "b"])))
    assert last_formed(store) == Formed(3, 1, ["a", "b"])
