"""A proxy without sockets: in whatever order things happen, clients are told what the server would have told them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.wire import Decoder, Op, Status, encode
from disttrain.store.proxy.hub import ProxyHub
from tests.state_machines.proxied_store import CLIENTS, FRAME_BYTES, PROXIES, Line, World

KEYS = st.sampled_from(["a", "b"])
TIMES = st.sampled_from([1.0, 5.0])
VALUES = st.sampled_from([b"", b"x", b"1"])
REQUESTS = st.one_of(
    st.tuples(st.just(Op.SET), KEYS, VALUES),
    st.tuples(st.just(Op.GET), KEYS, TIMES),
    st.tuples(st.just(Op.ADD), KEYS, st.sampled_from([1, 3, -2, (1 << 63) - 2])),
    st.tuples(st.just(Op.ADD), KEYS, st.sampled_from([1, "1"])),
    st.tuples(st.just(Op.APPEND), KEYS, VALUES),
    st.tuples(st.just(Op.COMPARE_SET), KEYS, VALUES, VALUES),
    st.tuples(st.just(Op.CHECK), st.lists(KEYS)),
    st.tuples(st.just(Op.WAIT), st.lists(KEYS, max_size=2), TIMES),
    st.tuples(st.just(Op.DELETE_KEY), KEYS),
    st.tuples(st.just(Op.MULTI_GET), st.lists(KEYS, max_size=2), TIMES),
    st.tuples(st.just(Op.BARRIER), KEYS, st.sampled_from([2, 3]), TIMES),
    st.tuples(st.just(Op.QUEUE_PUSH), KEYS, VALUES, st.sampled_from([0, 1]), TIMES),
    st.tuples(st.just(Op.QUEUE_POP), KEYS, st.sampled_from([0, 1.0, 5.0])),
    st.tuples(st.just(Op.WATCH), KEYS, st.none() | VALUES, TIMES),
    st.tuples(st.just(Op.LIST_KEYS), st.just("")),
    st.tuples(st.just(Op.GET), st.just(3), TIMES),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(CLIENTS), REQUESTS),
        st.tuples(st.sampled_from(["flush", "serve", "deliver"]), st.sampled_from(PROXIES)),
        st.tuples(st.sampled_from(["flush", "serve", "deliver"]), st.sampled_from(PROXIES)),
        st.tuples(st.sampled_from(["cut", "give_up", "die"]), st.sampled_from(CLIENTS)),
        st.tuples(st.just("lose"), st.sampled_from(PROXIES)),
        st.tuples(st.just("pass_time"), st.sampled_from([0.4, 2.0])),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
@example([("ask", 0, (Op.ADD, "a", 1)), ("flush", 0), ("serve", 0), ("lose", 0)])
@example([("ask", 0, (Op.ADD, "a", 1)), ("flush", 0), ("serve", 0), ("cut", 0), ("deliver", 0)])
@example([("ask", 0, (Op.QUEUE_POP, "a", 5.0)), ("flush", 0), ("serve", 0), ("cut", 0), ("flush", 0), ("serve", 0)])
def test_clients_of_proxies_are_told_what_the_server_would_have_told_them(steps: list[Any]) -> None:
    world = World()
    for step, who, *rest in steps:
        if step in ("ask", "cut", "give_up", "die"):
            world.come_back(who)
        if step == "ask":
            world.ask(who, *rest[0])
        else:
            getattr(world, step)(who)
    world.settle()
    for key, reply in world.told.items():
        # Of those that time out together at a barrier each is told of all; those that leave it one by one, of fewer.
        is_late = world.ops[key[1]] == Op.BARRIER and reply[1] == Status.TIMEOUT
        assert reply[: 2 if is_late else 3] == world.expected[key][: 2 if is_late else 3]
    assert world.direct.copies() == world.server.state.copies()
    for client in CLIENTS:
        for request_id in world.asked[client]:
            assert world.direct.waits(client, request_id)
    # Nobody waits at the server whose answer would change something, and who is not there.
    for parked in world.direct.parked_changes():
        assert parked.request_id in world.asked[parked.connection]
    assert all(not proxy.forwarding._orphans for proxy in world.proxies)


@pytest.mark.parametrize("num_clients", [3, 30])
def test_equal_waits_go_as_one_and_changes_stay_in_order(num_clients: int) -> None:
    proxy = ProxyHub(None, Limits())
    lines = [Line(proxy, itertools.count(100 * number + 1)) for number in range(num_clients)]
    for line in lines:
        line.connect(0.0)
        proxy.received(line.connection, encode([0, int(Op.WAIT), ["a"], 5.0]), 0.0)
    proxy.received(lines[0].connection, encode([1, int(Op.SET), "a", b"1"]), 0.0)
    for line in lines:
        proxy.received(line.connection, encode([2, int(Op.GET), "a", 5.0]), 0.0)
    sent = Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames()))
    assert [message[1] for message in sent] == [Op.WAIT, Op.SET, Op.GET]
    actions = proxy.answered([[message[0], 0, b"1"] for message in sent])
    assert len(actions) == num_clients
    assert len(Decoder(FRAME_BYTES).feed(actions[1][1])) == 2


def test_no_more_is_changed_at_the_same_time_than_the_server_remembers() -> None:
    proxy = ProxyHub(None, Limits())
    line = Line(proxy, itertools.count(1))
    line.connect(0.0)
    told_at_s: list[float] = []
    proxy.send = told_at_s.append
    for number in range(100):
        proxy.received(line.connection, encode([number, int(Op.APPEND), "a", b""]), 0.0)
    first = proxy.forwarding.frames()
    assert len(first) == 64
    assert len(proxy.forwarding.frames_again()) == 64
    assert not proxy.forwarding.frames()
    proxy.answered([[message[0], 0, 1] for message in Decoder(FRAME_BYTES).feed(b"".join(first[:10]))])
    assert len(proxy.forwarding.frames()) == 10
    assert told_at_s.pop() < 0.0  # there is room again


def test_reads_with_a_change_between_them_go_on_their_own() -> None:
    proxy = ProxyHub(None, Limits())
    line = Line(proxy, itertools.count(1))
    line.connect(0.0)
    for number, request in enumerate([[Op.CHECK, ["a"]], [Op.SET, "a", b""], [Op.CHECK, ["a"]], [Op.CHECK, ["a"]]]):
        proxy.received(line.connection, encode([number, *request]), 0.0)
    sent = Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames()))
    assert [message[1] for message in sent] == [Op.CHECK, Op.SET, Op.CHECK]


def test_what_the_server_would_not_take_is_refused_here() -> None:
    proxy = ProxyHub(None, Limits())
    proxy.forwarding.frame_bytes = 100
    line = Line(proxy, itertools.count(1))
    line.connect(0.0)
    assert not proxy.received(1, encode([0, int(Op.SET), "a", bytes(200)]), 0.0)
    assert not proxy.forwarding.frames()
    (action,) = proxy.refused()
    assert Decoder(FRAME_BYTES).feed(action[1])[0][1] == Status.LIMIT
    for message, words in (
        ([1, 99], "no operation"),
        ([2, int(Op.SET)], "takes 2 arguments"),
        ([3, int(Op.FOLLOW), "h", 1, 1.0], "ask the server itself"),
    ):
        ((_, data, _),) = proxy.received(1, encode(message), 0.0)
        reply = Decoder(FRAME_BYTES).feed(data)[0]
        assert reply[1] == Status.REFUSED
        assert words in reply[2]


@pytest.mark.parametrize("num_waiting", [1, 50])
def test_a_request_goes_at_once_where_the_others_only_wait(num_waiting: int) -> None:
    """One after another they need no batch; while an answer is to come soon, what comes goes together."""
    hub = ProxyHub(None, Limits())
    line = Line(hub, itertools.count(1))
    line.connect(0.0)
    for number in range(num_waiting):
        hub.received(line.connection, encode([number, int(Op.WATCH), f"board/{number}", None, 60.0]), 0.0)
    assert len(hub.forwarding.frames()) == num_waiting
    for number in range(num_waiting, num_waiting + 3):
        assert not hub.forwarding.awaits_answers
        hub.received(line.connection, encode([number, int(Op.SET), "key", b"value"]), 0.0)
        (frame,) = hub.forwarding.frames()
        assert hub.forwarding.awaits_answers
        (request,) = Decoder(FRAME_BYTES).feed(frame)
        hub.answered([[request[0], int(Status.OK), None]])
    assert not hub.forwarding.awaits_answers
