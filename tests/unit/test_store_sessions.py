"""What the server remembers of its clients: a request is applied once, however often links break; no memory grows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.sessions import MAX_REPLIES, MAX_REPLY_BYTES, SESSION_S, Session
from disttrain.store.protocol.wire import NOT_A_REQUEST, Decoder, Op, Status, encode
from disttrain.store.serving.hub import Hub


class Client:
    """A client without sockets: its hub's answers come as messages."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.session = b""
        self.connection = 0

    def connect(self, connection: int, now_s: float = 0.0) -> list[Any]:
        """The verdict."""
        ((_, hello, _),) = self.hub.connected(connection, now_s)
        handshake = ClientHandshake(None, "here", self.session)
        actions = self.hub.received(connection, encode(handshake.answer(Decoder(512).feed(hello)[0])), now_s)
        verdict = Decoder(512).feed(actions[-1][1])[0]
        if verdict[0] == Status.OK:
            self.session, self.connection = verdict[3], connection
        return verdict

    def ask(self, *request: Any, now_s: float = 0.0) -> list[Any]:
        """The answers to us."""
        actions = self.hub.received(self.connection, encode(request), now_s)
        data = b"".join(data for connection, data, _ in actions if connection == self.connection)
        return Decoder(1 << 24).feed(data)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["add", "lost request", "lost answer"]), max_size=40))
def test_each_request_is_applied_once_whatever_is_lost(fates: list[str]) -> None:
    client = Client(Hub())
    client.connect(1)
    for number, fate in enumerate(fates):
        expected = [[number, Status.OK, number + 1]]
        if fate == "add":
            assert client.ask(number, Op.ADD, "counter", 1) == expected
            continue
        if fate == "lost answer":
            client.ask(number, Op.ADD, "counter", 1)
        client.hub.disconnected(client.connection, 0.0)
        assert client.connect(number + 2)[0] == Status.OK
        assert client.ask(number, -Op.ADD, "counter", 1) == expected


def test_an_answer_to_a_request_that_was_parked_is_remembered_too() -> None:
    hub = Hub()
    first, second = Client(hub), Client(hub)
    first.connect(1)
    second.connect(2)
    assert first.ask(0, Op.QUEUE_POP, "jobs", 9) == []
    second.ask(0, Op.QUEUE_PUSH, "jobs", b"1", 0, 9)
    second.ask(1, Op.QUEUE_PUSH, "jobs", b"2", 0, 9)
    hub.disconnected(1, 0.0)
    first.connect(3)
    assert first.ask(0, -Op.QUEUE_POP, "jobs", 9) == [[0, Status.OK, b"1"]]
    assert first.ask(1, Op.QUEUE_POP, "jobs", 9) == [[1, Status.OK, b"2"]]


@pytest.mark.parametrize("first", [(Op.GET, "key", 9), (Op.QUEUE_POP, "jobs", 9)])
@pytest.mark.parametrize("second", [(Op.QUEUE_POP, "jobs", 9), (Op.SET, "key", b""), (-Op.SET, "key", b"")])
def test_an_id_that_waits_for_its_answer_is_no_other_request_s(first: list[Any], second: list[Any]) -> None:
    hub = Hub()
    client = Client(hub)
    client.connect(1)
    assert client.ask(3, *first) == []
    assert client.ask(3, *second) == [[NOT_A_REQUEST, Status.REFUSED, "request 3 waits for its answer already"]]
    assert (hub.num_clients, hub.state.num_parked) == (0, 0)
    assert client.connect(2)[0] == Status.GONE


def test_a_new_connection_takes_the_place_of_one_that_only_seems_alive() -> None:
    hub = Hub()
    client = Client(hub)
    client.connect(1)
    assert client.ask(0, Op.BARRIER, "go", 2, 9) == []
    client.connect(2)
    assert hub.num_clients == 1
    assert hub.state.num_parked == 0
    assert client.ask(0, -Op.BARRIER, "go", 2, 9) == []
    assert sorted(client.ask(1, Op.BARRIER, "go", 2, 9)) == [[0, Status.OK, None], [1, Status.OK, None]]


def test_a_client_that_stays_away_is_forgotten() -> None:
    hub = Hub()
    client = Client(hub)
    client.connect(1)
    hub.disconnected(1, 10.0)
    client.connect(2, 20.0)
    hub.disconnected(2, 30.0)
    hub.tick(10.0 + SESSION_S)
    assert client.connect(3, 85.0)[0] == Status.OK
    hub.disconnected(3, 90.0)
    hub.tick(90.0 + SESSION_S)
    assert client.connect(4, 200.0)[0] == Status.GONE
    assert hub.next_deadline_s is None or hub.next_deadline_s > 200.0
    assert not hub._sessions._of
    assert not hub._sessions._cut_off


def test_a_client_that_leaves_is_forgotten_at_once() -> None:
    hub = Hub()
    client = Client(hub)
    client.connect(1)
    assert client.ask(7, Op.LEAVE) == [[7, Status.OK, None]]
    hub.disconnected(1, 0.0)
    assert not hub._sessions._of
    assert hub.next_deadline_s in (None, 5.0)


def test_what_is_remembered_is_bounded_and_what_was_forgotten_is_not_done_again() -> None:
    session = Session(b"name", 1)
    for number in range(10 * MAX_REPLIES):
        session.keep([number, 0, None])
    assert session._replies is not None
    assert len(session._replies) <= MAX_REPLIES
    assert session.told(10 * MAX_REPLIES - 1) == [10 * MAX_REPLIES - 1, 0, None]
    assert session.told(10 * MAX_REPLIES) is None
    told = session.told(0)
    assert told is not None
    assert told[1] == Status.REFUSED
    assert "does not know any more" in told[2]
    for number in range(5):
        session.keep([10_000 + number, 0, b"x" * MAX_REPLY_BYTES])
        assert session.told(10_000 + number) == [10_000 + number, 0, b"x" * MAX_REPLY_BYTES]
    assert len(session._replies) == 1


def test_too_many_clients_hear_which_limit_it_is() -> None:
    hub = Hub(limits=Limits(num_clients=1))
    assert Client(hub).connect(1)[0] == Status.OK
    verdict = Client(hub).connect(2)
    assert verdict == [Status.LIMIT, "the store has 2 clients; the limit is 1 (DISTTRAIN_STORE_MAX_CLIENTS)."]


anything = (
    st.none() | st.booleans() | st.integers(-30, 30) | st.binary(max_size=2) | st.lists(st.integers(0, 9), max_size=2)
)


@settings(max_examples=100)
@given(st.lists(st.lists(anything, max_size=5), max_size=12))
@example([[0, int(Op.LEAVE)]])
def test_no_request_breaks_the_hub(requests: list[list[Any]]) -> None:
    hub = Hub()
    client = Client(hub)
    client.connect(1)
    for request in requests:
        for answer in client.ask(*request):
            assert len(answer) == 3
    may_have_left = any(type(op) is int and abs(op) == Op.LEAVE for _, op, *_ in (r for r in requests if len(r) > 1))
    assert hub.num_clients == 1 or may_have_left
    hub.disconnected(1, 0.0)
    hub.tick(1000.0)
    assert hub.state.num_parked == 0
    assert hub.next_deadline_s is None
