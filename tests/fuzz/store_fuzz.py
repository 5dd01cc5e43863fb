"""Whatever bytes the store's server and its clients are sent: no crash, no leak, each request answered once.

`python tests/fuzz/store_fuzz.py --seconds 60` lets atheris, which is guided by coverage, look for bytes that break one
of the targets (`pip install 'disttrain[fuzz]'`); `--target` names one of them. What it finds is written to a file, and
`--replay FILE` plays it again. The suite runs the targets over bytes that hypothesis makes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from disttrain.errors import StoreError
from disttrain.store.protocol.auth import client_proof
from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.sessions import SESSION_S
from disttrain.store.protocol.state import StoreState
from disttrain.store.protocol.wire import (
    HANDSHAKE_FRAME_BYTES,
    PROTOCOL_VERSION,
    Decoder,
    Op,
    Status,
    WireError,
    encode,
)
from disttrain.store.serving.hub import HANDSHAKE_S, Hub

TOKEN = "0123456789abcdef"
LIMITS = Limits(key_bytes=24, value_bytes=40, frame_bytes=600, num_keys=8, num_clients=3, total_bytes=200)
NAMES = ["", "a", "b", "ab", "c" * 24, "d" * 25, "\N{SNOWMAN}" * 9]
VALUES = [b"", b"7", b"-1", b"x" * 20, b"y" * 40, b"z" * 41, b"9223372036854775807"]
TIMEOUTS = [1, 2.5, 1e300, 0, -1, float("nan"), float("inf"), 1 << 63]
WILD = [None, True, 0, -1, 1 << 63, 0.5, "a", b"a", [], ["a"], [b"a"], {}, {"a": 1}, [["a"], 3]]
ARGUMENTS: dict[Op, str] = {
    Op.SET: "kv",
    Op.GET: "kt",
    Op.ADD: "ki",
    Op.APPEND: "kv",
    Op.COMPARE_SET: "kvv",
    Op.CHECK: "K",
    Op.WAIT: "Kt",
    Op.DELETE_KEY: "k",
    Op.NUM_KEYS: "",
    Op.MULTI_GET: "Kt",
    Op.MULTI_SET: "KV",
    Op.BARRIER: "kit",
    Op.LIST_KEYS: "k",
    Op.QUEUE_PUSH: "kvit",
    Op.QUEUE_POP: "kt",
    Op.QUEUE_LEN: "k",
    Op.WATCH: "kot",
    Op.CANCEL: "i",
}


class Choices:
    """Decisions, drawn from bytes; when these have run out, all decisions are 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def __bool__(self) -> bool:
        return self._position < len(self._data)

    def number(self, num_choices: int) -> int:
        self._position += 1
        return self._data[self._position - 1] % num_choices if self._position <= len(self._data) else 0

    def one_of(self, choices: Any) -> Any:
        return choices[self.number(len(choices))]

    def some(self, choices: list[Any]) -> list[Any]:
        return [self.one_of(choices) for _ in range(self.number(4))]

    def piece(self) -> bytes:
        start = self._position + 1
        self._position = start + self.number(256)
        return self._data[start : self._position]

    def argument(self, kind: str) -> Any:
        """k: key, v: value, t: timeout, i: integer, K, V: several, o: what a watcher has seen; or nonsense."""
        if self.number(16) == 15:
            return self.one_of(WILD)
        if kind == "i":
            return self.number(6) - 1
        if kind == "o":
            return self.one_of([None, *VALUES])
        choices = {"k": NAMES, "v": VALUES, "t": TIMEOUTS}[kind.lower()]
        return self.some(choices) if kind.isupper() else self.one_of(choices)

    def request(self, request_id: int) -> list[Any]:
        op = self.one_of(list(ARGUMENTS))
        arguments = [self.argument(kind) for kind in ARGUMENTS[op]]
        if op is Op.CANCEL:
            arguments = [max(request_id - self.number(8), 0), 0][: self.one_of([1, 1, 1, 2])]
        return [request_id, int(op), *arguments]


def decoder(data: bytes) -> None:
    """However a stream is cut, its messages, and where it breaks, are the same; nothing is kept beyond one frame."""
    choices = Choices(data[:16])
    stream = data[16:]
    whole, is_broken = decoded([stream])
    pieces = []
    rest = stream
    while rest and choices:
        size = choices.number(40)
        pieces.append(rest[:size])
        rest = rest[size:]
    in_pieces, breaks_in_pieces = decoded([*pieces, rest])
    # Of a stream that breaks, what stood before the bad frame may come or not, as it was cut.
    assert is_broken == breaks_in_pieces
    assert is_broken or repr(in_pieces) == repr(whole)
    for message in whole:
        assert repr(Decoder(1 << 20).feed(encode(message))) == repr([message])


def decoded(pieces: list[bytes]) -> tuple[list[Any], bool]:
    decoder = Decoder(LIMITS.frame_bytes)
    messages = []
    for piece in pieces:
        try:
            messages += decoder.feed(piece)
        except WireError:
            return messages, True
        assert 0 <= decoder.num_missing_bytes <= LIMITS.frame_bytes
    return messages, False


def strangers(data: bytes) -> None:
    """Who does not know the token gets nothing in, is told nothing but that, and is hung up on in time."""
    hub = Hub(TOKEN, LIMITS)
    choices = Choices(data)
    is_open = set()
    for connection in range(3):
        hub.connected(connection, 0.0)
        is_open.add(connection)
    while choices:
        connection = choices.number(4)
        piece = choices.piece()
        sent = piece if choices.number(2) else len(piece).to_bytes(4, "big") + piece
        for target, told, reason in hub.received(connection, sent, 1.0):
            assert target == connection
            assert target in is_open
            assert reason
            is_open.discard(target)
            if told:
                (verdict,) = Decoder(HANDSHAKE_FRAME_BYTES).feed(told)
                assert verdict[0] != Status.OK
                assert len(verdict) == 2
    assert hub.num_clients == 0
    assert hub.state.handle(9, [1, Op.NUM_KEYS], 1.0) == [(9, [1, Status.OK, 0])]
    assert {target for target, _, _ in hub.tick(HANDSHAKE_S)} == is_open
    assert hub.next_deadline_s is None


def servers(data: bytes) -> None:
    """Whatever a server says while a client connects, the client goes on only with one that knows the token."""
    choices = Choices(data)
    token = choices.one_of([TOKEN, None])
    client = ClientHandshake(token, "fuzz")
    for step in (client.answer, client.conclude):
        hello = choices.one_of(
            [None, ["disttrain store", PROTOCOL_VERSION, b"n" * 32], ["disttrain store", PROTOCOL_VERSION, b""]]
        )
        try:
            if step == client.conclude or hello is None:
                body = choices.piece()
                (hello,) = Decoder(HANDSHAKE_FRAME_BYTES).feed(len(body).to_bytes(4, "big") + body)
            step(hello)
        except StoreError:
            return
    assert token is None


class Audit:
    """A state machine with a list of who waits; recounts everything after each step."""

    def __init__(self, state: StoreState) -> None:
        self.state = state
        self.waiting: Counter[tuple[int, int]] = Counter()

    def answered(self, replies: list[tuple[int, list[Any]]]) -> None:
        for connection, reply in replies:
            assert type(reply) is list
            assert len(reply) == 3
            self.waiting[connection, reply[0]] -= 1
            assert self.waiting[connection, reply[0]] >= 0, "answered twice"
            assert len(encode(reply)) <= self.state.limits.frame_bytes + 400
        self.recount()

    def recount(self) -> None:
        state, queues = self.state, self.state._queues._values
        queued = [value for queue in queues.values() for value in queue]
        assert all(queues.values())
        assert state._num_values == len(state._values) + len(queued) <= state.limits.num_keys
        kept = sum(len(key) + len(value) for key, value in state._values.items())
        assert state._total_bytes == kept + sum(map(len, queued)) <= state.limits.total_bytes
        assert state.num_parked == self.waiting.total()
        assert not state._woken
        for name in state._queues._poppers:
            assert name not in state._queues._pushers, "one waits to give what another waits to get"

    def end(self) -> None:
        """Let all time pass: nobody is left, nor any trace of them."""
        self.answered(self.state.expire(float("inf")))
        state = self.state
        assert state.num_parked == 0
        queues = state._queues
        assert [state._waiting, state._barriers, state._parking._of, queues._poppers, queues._pushers] == [{}] * 5


def requests(data: bytes) -> None:
    """The state machine: it never raises, its totals are those of a recount, each request is answered exactly once."""
    choices = Choices(data)
    audit = Audit(StoreState(LIMITS))
    now_s, request_id = 0.0, 0
    while choices:
        connection, event = choices.number(3), choices.number(12)
        if event == 0:
            audit.state.disconnect(connection)
            for key in [key for key in audit.waiting if key[0] == connection]:
                del audit.waiting[key]
        elif event == 1:
            now_s += choices.number(4)
            audit.answered(audit.state.expire(now_s))
        elif event == 2:
            audit.state.handle(connection, [choices.one_of(WILD) for _ in range(choices.number(5))], now_s)
        else:
            request_id += 1
            request = choices.request(request_id)
            audit.waiting[connection, request_id] += 1
            replies = audit.state.handle(connection, request, now_s)
            if request[1] == Op.CANCEL and replies[0][1][2] is True:
                del audit.waiting[connection, request[2]]
            audit.answered(replies)
    audit.end()


class Crowd:
    """Clients that know the token, before one hub; `is_open` has those that were not hung up on."""

    def __init__(self, token: str | None) -> None:
        self.hub = Hub(token, LIMITS)
        self.now_s = 0.0
        self.is_open: set[int] = set()
        self._token = token
        self._sessions = [b""]
        self._sent = defaultdict[int, Decoder](lambda: Decoder(1 << 20))
        self._num_connections = 0
        self._num_requests = 0

    def deliver(self, actions: list[Any]) -> None:
        for target, told, reason in actions:
            assert target in self.is_open
            Decoder(1 << 20).feed(told)
            if reason:
                self.is_open.discard(target)

    def connect(self, choices: Choices) -> None:
        """Somebody new, or who comes back, perhaps while its old connection is still there."""
        self._num_connections += 1
        connection = self._num_connections
        ((_, hello, _),) = self.hub.connected(connection, self.now_s)
        self.is_open.add(connection)
        server_nonce, nonce = Decoder(HANDSHAKE_FRAME_BYTES).feed(hello)[0][2], b"n" * 32
        proof = b"" if self._token is None else client_proof(self._token, server_nonce, nonce)
        session = choices.one_of(self._sessions)
        told = self.hub.received(connection, encode([PROTOCOL_VERSION, nonce, proof, session, 0]), self.now_s)
        verdict = Decoder(HANDSHAKE_FRAME_BYTES).feed(told[-1][1])[0]
        if verdict[0] == Status.OK:
            self._sessions.append(verdict[3])
            # Who comes back has a place, whoever else has come meanwhile.
            assert session or self.hub.num_clients <= LIMITS.num_clients
        self.deliver(told)

    def send(self, connection: int, data: bytes) -> None:
        try:
            messages = self._sent[connection].feed(data)
        except WireError:
            messages = []
        self.deliver(self.hub.received(connection, data, self.now_s))
        if connection in self.is_open - set(self.hub._connections):
            assert any(message[1] in (Op.LEAVE, -Op.LEAVE) for message in messages), "let go without a word"
            self.is_open.discard(connection)

    def ask(self, connection: int, choices: Choices) -> None:
        """A request, perhaps under an old number, or as a repeated one, or the last."""
        self._num_requests += 1
        request = choices.request(choices.number(self._num_requests + 1))
        request[1] *= 1 - 2 * choices.number(2)
        last = encode([self._num_requests, int(Op.LEAVE)]) if choices.number(8) == 7 else b""
        self.send(connection, encode(request) + last)

    def check(self) -> None:
        peers = self.hub._connections
        assert set(peers) == self.is_open
        assert self.hub.num_clients == sum(peer.session is not None for peer in peers.values())


def clients(data: bytes) -> None:
    """Clients that the server knows: nonsense, repeated requests, broken links, one who goes on for another."""
    choices = Choices(data)
    crowd = Crowd(choices.one_of([None, TOKEN]))
    while choices:
        event = choices.number(12)
        crowd.now_s += choices.number(3) + SESSION_S * (event == 4)
        crowd.deliver(crowd.hub.tick(crowd.now_s))
        connection = choices.one_of(sorted(crowd.is_open) or [0])
        if event == 0:
            crowd.connect(choices)
        elif event == 1:
            crowd.hub.disconnected(connection, crowd.now_s)
            crowd.is_open.discard(connection)
        elif event == 2:
            crowd.send(connection, choices.piece())
        elif event == 3:
            body = choices.piece()
            crowd.send(connection, len(body).to_bytes(4, "big") + body)
        else:
            crowd.ask(connection, choices)
        crowd.check()
    for connection in crowd.is_open:
        crowd.hub.disconnected(connection, crowd.now_s)
    assert crowd.hub.state.num_parked == 0
    crowd.hub.tick(crowd.now_s + SESSION_S + HANDSHAKE_S)
    assert not crowd.hub._sessions._of


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (decoder, strangers, servers, requests, clients)
}


def seeds() -> list[bytes]:
    """Bytes that come a little way into each target."""
    frames = [
        encode(message)
        for message in (
            [1, int(Op.SET), "a", b"7"],
            [PROTOCOL_VERSION, b"n" * 32, b"p" * 32, b"", 0],
            ["disttrain store", PROTOCOL_VERSION, b"n" * 32],
        )
    ]
    nested: Any = []
    for _ in range(500):
        nested = [nested]
    return [
        b"",
        bytes(range(256)),
        *(bytes(16) + frame for frame in frames),
        *(bytes([0, len(frame)]) + frame for frame in frames),
        bytes(16) + encode([1, msgpack.Timestamp(1, 2)]),
        bytes(16) + encode(nested[0]),
        *(bytes([*([0, 0] * 3), *[5, 0, op, 0] * 12]) for op in range(len(ARGUMENTS))),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for bytes that break the store's protocol.")
    parser.add_argument("--seconds", type=int, default=60, help="how long to look, in all")
    parser.add_argument("--target", choices=list(TARGETS), help="the only target (default: all, by the first byte)")
    parser.add_argument("--corpus", type=Path, help="a folder of bytes to begin with, to which new ones are added")
    parser.add_argument("--replay", type=Path, help="run the target over this file alone")
    options = parser.parse_args()
    names = [options.target] if options.target else list(TARGETS)

    def run(data: bytes) -> None:
        target = TARGETS[names[data[0] % len(names)]] if data else None
        if target is not None:
            target(data[1:])

    if options.replay:
        run(options.replay.read_bytes())
        return 0
    import atheris  # here: who runs the targets by other means does without

    atheris.instrument_all()
    if options.corpus:
        options.corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            for first in range(len(names)):
                (options.corpus / f"seed-{number}-{first}").write_bytes(bytes([first]) + seed)
    folder = [str(options.corpus)] if options.corpus else []
    atheris.Setup([sys.argv[0], f"-max_total_time={options.seconds}", "-max_len=700", *folder], run)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
