"""A store's server and its proxies without sockets: hubs, and bytes between them in lists.

Beside the server's state stands another that is asked the same by the clients themselves, when the server comes to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.state import Outgoing, StoreState
from disttrain.store.protocol.wire import READING, Decoder, Message, Op, Status, encode
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
            # Of equal changes those that follow change nothing any more, and may well have come before.
            if op not in (Op.SET, Op.COMPARE_SET) or request_id == members[0][1]:
                self.check_order(client, request_id)
            # One that was cut off, and whose equals were not, has been kept so far.
            self.leave_direct(client, request_id)
        if is_apart:
            return
        if op in (Op.ADD_EACH, Op.MULTI_SET):
            # Who waits for the counter, or for these keys, sees all of them at once.
            (_, (_, status, totals)), *woken = self.direct.handle(0, [GROUP_ID, op, *arguments], self.now_s)
            values = totals if op == Op.ADD_EACH and status == Status.OK else [totals] * len(members)
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
