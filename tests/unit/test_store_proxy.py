"""A proxy without sockets: whatever happens in whatever order, clients are told what the server would have told them.

The server is a hub, and so are the proxies; bytes between them wait in lists until a step moves them. Beside the
server's state stands another that is asked the same by the clients themselves, when the server comes to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.state import Outgoing, StoreState
from disttrain.store.protocol.wire import COUNTED, READING, Decoder, Message, Op, Status, encode
from disttrain.store.proxy.hub import ProxyHub
from disttrain.store.serving.hub import Hub

FRAME_BYTES = 1 << 20
CLIENTS = range(6)
PROXIES = range(2)
GROUP_ID = 1 << 40
"""Of what several ask together, where each has an id of its own."""

OURS = 3
"""Clients of each proxy."""


class Line:
    """A client's connection to a hub, and its session over several of them."""

    def __init__(self, hub: Hub, numbers: Iterator[int]) -> None:
        self.hub = hub
        self.numbers = numbers
        self.session = b""
        self.connection = 0

    def connect(self, now_s: float) -> None:
        self.connection = next(self.numbers)
        handshake = ClientHandshake(None, "", self.session)
        hello = Decoder(FRAME_BYTES).feed(self.hub.connected(self.connection, now_s)[0][1])[0]
        actions = self.hub.received(self.connection, encode(handshake.answer(hello)), now_s)
        verdicts = [data for connection, data, _ in actions if connection == self.connection]
        handshake.conclude(Decoder(FRAME_BYTES).feed(verdicts[0])[0])
        self.session = handshake.session


class Recorded(StoreState):
    """The server's state, which tells what it does."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def handle(self, connection: int, request: Message, now_s: float) -> list[Outgoing]:
        replies = super().handle(connection, request, now_s)
        is_apart = any(reply[:2] == [request[0], Status.APART] for _, reply in replies)
        self.world.comes(connection, request, is_apart)
        return replies

    def disconnect(self, connection: int) -> None:
        super().disconnect(connection)
        self.world.cut_at_server(connection)


class World:
    """A server, its proxies and their clients."""

    def __init__(self) -> None:
        self.now_s = 0.0
        numbers = itertools.count(1)
        self.server = Hub(None, Limits())
        self.server.state = Recorded(self)
        self.direct = StoreState()
        self.proxies = [ProxyHub(None, Limits()) for _ in PROXIES]
        for proxy in self.proxies:
            proxy.forwarding.most_changing = 2
        self.links = [Line(self.server, numbers) for _ in PROXIES]
        self.lines = [Line(self.proxies[client // OURS], numbers) for client in CLIENTS]
        self.up: list[list[bytes]] = [[] for _ in PROXIES]
        self.down: list[list[bytes]] = [[] for _ in PROXIES]
        self.expected: dict[tuple[int, int], Message] = {}
        self.told: dict[tuple[int, int], Message] = {}
        self.asked: list[dict[int, list[Any]]] = [{} for _ in CLIENTS]
        """Requests of each client that have no answer yet."""
        self.ids = itertools.count()
        self.owners: dict[int, int] = {}
        self.ops: dict[int, Op] = {}
        self.came: set[int] = set()
        self.last_change = [-1 for _ in CLIENTS]
        self.last_asked = [-1 for _ in CLIENTS]
        self.of_sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for line in (*self.links, *self.lines):
            line.connect(0.0)

    # What happens at the server, and so at once for clients that ask directly.

    def comes(self, connection: int, request: Message, is_apart: bool) -> None:
        proxy = next(number for number in PROXIES if self.links[number].connection == connection)
        number, op, *arguments = request
        if op == Op.CANCEL:
            for client, request_id in self.of_sent.get((proxy, arguments[0]), []):
                self.leave_direct(client, request_id)
            return
        members = self.of_sent[proxy, number]
        for client, request_id in members:
            self.check_order(client, request_id)
            # One that was cut off, and whose equals were not, has been kept so far.
            self.leave_direct(client, request_id)
        if is_apart:
            return
        if op == Op.ADD_EACH:
            # Who waits for the counter sees all of them at once.
            (_, (_, status, totals)), *woken = self.direct.handle(0, [GROUP_ID, op, *arguments], self.now_s)
            values = totals if status == Status.OK else [totals] * len(members)
            told = [(client, [one, status, value]) for (client, one), value in zip(members, values, strict=True)]
            self.hear_direct([*told, *woken])
            return
        if op == Op.BARRIER_EACH:
            op, num_together = Op.BARRIER, arguments.pop()
            assert num_together == len(members)
        for client, request_id in members:
            self.leave_direct(client, request_id)
            self.hear_direct(self.direct.handle(client, [request_id, op, *arguments], self.now_s))

    def check_order(self, client: int, request_id: int) -> None:
        """Of what a client asks, nothing overtakes a change, and no change overtakes anything."""
        if request_id in self.came:
            return
        self.came.add(request_id)
        if self.ops[request_id] not in READING:
            self.last_change[client] = max(self.last_change[client], request_id)
            assert self.last_asked[client] <= request_id
        assert self.last_change[client] <= request_id
        self.last_asked[client] = max(self.last_asked[client], request_id)

    def cut_at_server(self, connection: int) -> None:
        for proxy in PROXIES:
            if self.links[proxy].connection == connection:
                for client in range(proxy * OURS, (proxy + 1) * OURS):
                    self.direct.disconnect(client)

    def leave_direct(self, client: int, request_id: int) -> None:
        parked = self.direct._parking.find(client, request_id)
        if parked is not None:
            self.direct._parking.leave(parked)

    def hear_direct(self, replies: list[Outgoing]) -> None:
        for client, reply in replies:
            # What changes something is done once.
            assert (client, reply[0]) not in self.expected or self.ops[reply[0]] in READING
            self.expected[client, reply[0]] = reply

    # Steps.

    def ask(self, client: int, op: Op, *arguments: Any) -> None:
        request_id = next(self.ids)
        self.owners[request_id], self.ops[request_id] = client, op
        self.asked[client][request_id] = [op, *arguments]
        self.tell(client, [request_id, int(op), *arguments])

    def tell(self, client: int, message: Message) -> None:
        line = self.lines[client]
        self.hear(client // OURS, line.hub.received(line.connection, encode(message), self.now_s))

    def hear(self, proxy: int, actions: list[Any]) -> None:
        for connection, data, reason in actions:
            assert not reason
            client = next(one for one in CLIENTS if self.lines[one].connection == connection)
            assert client // OURS == proxy
            for reply in Decoder(FRAME_BYTES).feed(data):
                if self.asked[client].pop(reply[0], None) is not None:
                    self.told[client, reply[0]] = reply

    def flush(self, proxy: int, *, again: bool = False) -> None:
        forwarding = self.proxies[proxy].forwarding
        self.up[proxy] += forwarding.frames_again() if again else forwarding.frames()
        for number, sent in forwarding._sent.items():
            if sent.was_sent and sent.body[0] != Op.CANCEL:
                requests = [(self.owners[request.request_id], request.request_id) for request in sent.requests]
                self.of_sent.setdefault((proxy, number), requests)

    def serve(self, proxy: int) -> None:
        if self.up[proxy]:
            frame = self.up[proxy].pop(0)
            self.answer(self.server.received(self.links[proxy].connection, frame, self.now_s))

    def answer(self, actions: list[Any]) -> None:
        for connection, data, reason in actions:
            assert not reason
            for proxy in PROXIES:
                if self.links[proxy].connection == connection:
                    self.down[proxy].append(data)

    def deliver(self, proxy: int) -> None:
        if self.down[proxy]:
            messages = Decoder(FRAME_BYTES).feed(self.down[proxy].pop(0))
            self.hear(proxy, self.proxies[proxy].answered(messages))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.answer(self.server.tick(self.now_s))
        self.hear_direct(self.direct.expire(self.now_s))

    def cut(self, client: int) -> None:
        """The client loses its connection, and comes back with its next step."""
        line = self.lines[client]
        line.hub.disconnected(line.connection, self.now_s)
        line.connection = 0

    def come_back(self, client: int) -> None:
        line = self.lines[client]
        if line.connection:
            return
        line.connect(self.now_s)
        for request_id, (op, *arguments) in list(self.asked[client].items()):
            self.tell(client, [request_id, -int(op), *arguments])

    def give_up(self, client: int) -> None:
        """The client waits no longer for one of its requests."""
        if self.asked[client]:
            request_id = next(iter(self.asked[client]))
            del self.asked[client][request_id]
            self.tell(client, [next(self.ids), int(Op.CANCEL), request_id])

    def die(self, client: int) -> None:
        """The client ends, and another one comes in its place."""
        line = self.lines[client]
        line.hub.disconnected(line.connection, self.now_s)
        line.session = b""
        self.asked[client].clear()
        line.connect(self.now_s)

    def lose(self, proxy: int) -> None:
        """The proxy loses its connection, with all that was on its way, and comes back."""
        self.up[proxy].clear()
        self.down[proxy].clear()
        self.server.disconnected(self.links[proxy].connection, self.now_s)
        self.links[proxy].connect(self.now_s)
        self.flush(proxy, again=True)

    def settle(self) -> None:
        for client in CLIENTS:
            self.come_back(client)
        for _ in range(50):
            for proxy in PROXIES:
                self.flush(proxy)
                while self.up[proxy] or self.down[proxy]:
                    self.serve(proxy)
                    self.deliver(proxy)


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
        proxy.received(line.connection, encode([number, int(Op.SET), "a", b""]), 0.0)
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


@pytest.mark.parametrize("num_clients", [8, 64])
def test_adds_and_arrivals_count_once_a_node(num_clients: int) -> None:
    """Two requests for each, however many clients there are: what comes while the first is on its way is one."""
    proxy, server = ProxyHub(None, Limits()), StoreState()
    lines = [Line(proxy, itertools.count(100 * number + 1)) for number in range(num_clients)]
    for line in lines:
        line.connect(0.0)

    def ask_all(op: Op, *arguments: Any) -> tuple[list[Message], list[Any]]:
        """The requests that reach the server, and the values that clients are told."""
        requests: list[Message] = []
        told: dict[int, Any] = {}
        for number, line in enumerate(lines):
            proxy.received(line.connection, encode([0, int(op), *arguments]), 0.0)
            if number == 0:
                requests += Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames()))
        assert not proxy.forwarding.frames()
        for request in requests:  # which grow meanwhile
            replies = [reply for _, reply in server.handle(1, request, 0.0)] or [[COUNTED, 0, request[0]]]
            for connection, data, _ in proxy.answered(replies):
                told[connection] = Decoder(FRAME_BYTES).feed(data)[0][2]
            requests += Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames()))
        return requests, [told[line.connection] for line in lines]

    requests, totals = ask_all(Op.ADD, "sum", 3)
    assert [request[1] for request in requests] == [Op.ADD, Op.ADD_EACH]
    assert totals == [3 * number for number in range(1, num_clients + 1)]
    requests, nothing = ask_all(Op.BARRIER, "all", num_clients, 5.0)
    assert [request[1:] for request in requests] == [
        [Op.BARRIER_EACH, "all", num_clients, 5.0, num_together] for num_together in (1, num_clients - 1)
    ]
    assert nothing == [None] * num_clients


def test_what_is_too_much_together_goes_apart() -> None:
    """Adds of which one would pass 64 bits, and more arrivals than a barrier has members."""
    proxy, server = ProxyHub(None, Limits()), StoreState()
    lines = [Line(proxy, itertools.count(100 * number + 1)) for number in range(3)]
    for line in lines:
        line.connect(0.0)
    statuses: dict[int, list[int]] = {line.connection: [] for line in lines}
    for number, (op, name, argument) in enumerate(((Op.ADD, "sum", 3 << 61), (Op.BARRIER, "two", 2))):
        for line in lines:
            proxy.received(line.connection, encode([number, int(op), name, argument, *[5.0] * number]), 0.0)
        for _ in range(2):
            for request in Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames())):
                for connection, data, _ in proxy.answered([reply for _, reply in server.handle(1, request, 0.0)]):
                    statuses[connection] += [reply[1] for reply in Decoder(FRAME_BYTES).feed(data)]
    assert list(statuses.values()) == [[Status.OK, Status.OK], [Status.REFUSED, Status.OK], [Status.REFUSED]]
    assert proxy.forwarding.num_parked == server.num_parked == 1


@given(st.integers(-5, 5), st.lists(st.sampled_from([1, -3, (1 << 62), -(1 << 62)]), min_size=1, max_size=6))
def test_adds_together_are_adds_one_after_the_other(first: int, amounts: list[int]) -> None:
    together, apart = StoreState(), StoreState()
    for state in (together, apart):
        state.handle(0, [0, Op.ADD, "sum", first], 0.0)
    ((_, (_, status, totals)),) = together.handle(0, [1, Op.ADD_EACH, "sum", amounts], 0.0)
    replies = [apart.handle(0, [1, Op.ADD, "sum", amount], 0.0)[0][1] for amount in amounts]
    if status == Status.OK:
        assert [[1, 0, total] for total in totals] == replies
        assert together.copies() == apart.copies()
    else:
        assert status == Status.APART
        assert any(reply[1] == Status.REFUSED for reply in replies)


@pytest.mark.parametrize(
    "body", [[Op.ADD_EACH, "a", []], [Op.ADD_EACH, "a", [1, "2"]], [Op.BARRIER_EACH, "b", 2, 1.0, 0]]
)
def test_what_makes_no_sense_together_is_refused(body: list[Any]) -> None:
    ((_, reply),) = StoreState().handle(0, [0, *body], 0.0)
    assert reply[1] == Status.REFUSED
