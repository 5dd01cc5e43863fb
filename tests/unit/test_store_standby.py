"""A standby knows all that anybody was told: its replica is the leader's state, and no answer leaves too early."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.store.protocol.handshake import ClientHandshake
from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.sessions import SESSION_S
from disttrain.store.protocol.wire import NEWS, NOT_A_REQUEST, READING, Decoder, Message, Op, Status, encode
from disttrain.store.serving.hub import Hub
from disttrain.store.standby.journal import WINDOW_BYTES
from disttrain.store.standby.replica import Replica, present_state
from tests.fuzz.store_fuzz import LIMITS, Choices

PATIENCE_S = 4.0
FOLLOWER = 1


class Job:
    """A leader, its clients and its standby, without sockets: what is on its way may arrive later, or never."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.hub = Hub(None, limits)
        self.now_s = 0.0
        self.replica = Replica()
        """What the standby has applied and acknowledged, as far as the leader has heard of it."""
        self.entries: list[Message] = []
        """What the standby was sent and has not applied."""
        self.told: dict[int, list[Message]] = {}
        """What has arrived at each connection."""
        self.sessions: dict[int, bytes] = {}
        self.log: list[str] = []
        self._decoder = Decoder(1 << 30)

    def connect(self, connection: int, session: bytes = b"") -> bytes:
        """The session's name; b"" while the welcome waits."""
        ((_, hello, _),) = self.hub.connected(connection, self.now_s)
        self.told[connection] = []
        answer = ClientHandshake(None, "here", session).answer(Decoder(512).feed(hello)[0])
        self.deliver(self.hub.received(connection, encode(answer), self.now_s))
        return self.sessions.get(connection, b"")

    def follow(self, connection: int = FOLLOWER) -> None:
        self.connect(connection)
        self.ask(connection, 0, Op.FOLLOW, "other", 7, PATIENCE_S)

    def ask(self, connection: int, *request: Any) -> list[Message]:
        """All that the connection has been told by now, and has not been asked for."""
        self.deliver(self.hub.received(connection, encode(request), self.now_s))
        return self.take(connection)

    def take(self, connection: int) -> list[Message]:
        taken, self.told[connection] = self.told[connection], []
        return taken

    def deliver(self, actions: list[Any]) -> None:
        for connection, data, reason in actions:
            if connection == FOLLOWER and self.sessions.get(FOLLOWER):
                self.entries += self._decoder.feed(data)
            elif connection == 0:
                self.log.append(reason)
            elif connection in self.told:
                self._hear(connection, Decoder(1 << 30).feed(data))

    def _hear(self, connection: int, messages: list[Message]) -> None:
        if connection not in self.sessions and messages:
            verdict, *messages = messages
            if verdict[0] == Status.OK:
                self.sessions[connection] = verdict[3]
        self.told[connection] += messages

    def apply(self, num_entries: int) -> None:
        """The standby applies so many, and the leader hears of it."""
        entries, self.entries = self.entries[:num_entries], self.entries[num_entries:]
        for entry in entries:
            self.replica.apply(entry)
        if entries:
            self.ask(FOLLOWER, 0, Op.ACK, self.replica.num_entries, 0)

    def catch_up(self) -> None:
        while self.entries:
            self.apply(len(self.entries))

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        self.deliver(self.hub.tick(now_s))


def shape(state: Any, sessions: Any) -> list[Message]:
    """All there is to know about a state, as comparable values; numbers of connections, which differ, are left out."""
    name_of = {session.connection: session.name for session in sessions}
    return [encode(entry) for entry in present_state(state, sessions, name_of.__getitem__, 1)]


def waiting_request(choices: Choices, num_requests: int) -> Message:
    """One that often waits, or ends another's wait."""
    name, timeout_s = choices.one_of("ab"), choices.one_of([1, 3, 99])
    return choices.one_of(
        [
            [num_requests, int(Op.QUEUE_POP), name, timeout_s],
            [num_requests, int(Op.QUEUE_PUSH), name, b"%d" % num_requests, choices.number(3), timeout_s],
            [num_requests, int(Op.BARRIER), name, 2 + choices.number(2), timeout_s],
            [num_requests, int(Op.BARRIER_EACH), name, 2 + choices.number(2), timeout_s, 1 + choices.number(3)],
            [num_requests, int(Op.ADD_EACH), ["sum", choices.one_of(["sum", "b"])], [1, choices.one_of([2, 1 << 62])]],
            [num_requests, int(Op.CANCEL), max(0, num_requests - 1 - choices.number(9)), 0][
                : choices.one_of([3, 3, 4])
            ],
            [num_requests, int(Op.GET), name, timeout_s],
        ]
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_replica_is_what_the_leader_is(seed: int) -> None:
    choices = Choices(random.Random(seed).randbytes(800))
    job = Job(LIMITS._replace(num_clients=6))
    number = FOLLOWER
    open_: list[int] = []
    names: list[bytes] = [b""]
    begins = choices.number(60)
    num_requests = 0
    while choices:
        if begins == 0:
            job.follow()
        begins -= 1
        event = choices.number(14)
        job.now_s += choices.number(3) + SESSION_S * (event == 4)
        # Sessions and requests end, but the standby stays.
        if begins < 0 and job.hub._lead.journal is not None:
            job.hub._lead.journal.deadline_s = job.now_s + PATIENCE_S
        job.tick(job.now_s)
        connection = choices.one_of(open_ or [0])
        if event == 0 or not open_:
            number += 1
            job.connect(number, choices.one_of(names))
            open_ = [each for each in [*open_, number] if each in job.hub._connections]
            names += [name for each, name in job.sessions.items() if each != FOLLOWER and name not in names]
        elif event == 1:
            job.hub.disconnected(connection, job.now_s)
            open_.remove(connection)
        elif event == 2:
            body = choices.piece()
            job.deliver(job.hub.received(connection, len(body).to_bytes(4, "big") + body, job.now_s))
        elif event == 3:
            job.apply(choices.number(20))
        else:
            num_requests += 1
            request = waiting_request(choices, num_requests) if event < 10 else choices.request(choices.number(255))
            request[1] *= 1 - 2 * (choices.number(4) == 3)
            job.ask(connection, *request)
            if choices.number(16) == 15:
                job.ask(connection, num_requests, Op.LEAVE)
        open_ = [each for each in open_ if each in job.hub._connections]
    if begins >= 0:
        job.follow()
    # What was noted last goes out with the next that happens.
    job.ask(FOLLOWER, 0, Op.ACK, 0, 0)
    job.catch_up()
    assert job.replica.is_synced
    assert shape(job.replica.state, job.replica.sessions) == shape(job.hub.state, job.hub._sessions)


@pytest.mark.parametrize(
    "requests",
    [
        [(3, Op.QUEUE_POP, "a", 1), (4, Op.CANCEL, 3, 0)],
        [(3, Op.BARRIER, "b", 2, 9), (3, Op.QUEUE_POP, "a", 1), (4, Op.BARRIER, "b", 2, 9)],
    ],
)
def test_a_request_that_times_out_does_so_for_both_whatever_its_client_has_said(requests: list[Any]) -> None:
    job = Job()
    job.follow()
    job.connect(2)
    for request in requests:
        job.ask(2, *request)
    job.tick(2.0)
    job.ask(FOLLOWER, 0, Op.ACK, 0, 0)
    job.catch_up()
    assert job.hub.state.num_parked == job.replica.state.num_parked == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_was_acknowledged_is_there_once_when_the_leader_dies_at_any_moment(seed: int) -> None:
    """Clients add, push and pop; the standby lags; then the leader is gone, and they repeat what had no answer."""
    choices = Choices(random.Random(seed).randbytes(20 + seed % 300))
    job = Job()
    job.follow()
    clients = [2, 3, 4]
    names = {client: job.connect(client) for client in clients}
    job.catch_up()
    names = {client: job.sessions[client] for client in clients}
    asked: dict[int, list[Message]] = {client: [] for client in clients}
    told: dict[int, dict[int, Message]] = {client: {} for client in clients}
    num_requests = 0
    while choices:
        if choices.number(3) == 2:
            job.apply(1 + choices.number(3))
        else:
            client = choices.one_of(clients)
            num_requests += 1
            change = choices.one_of(
                [
                    [Op.ADD, "sum", 1],
                    [Op.QUEUE_PUSH, "queue", b"%d" % num_requests, choices.number(3), 99],
                    [Op.QUEUE_POP, "queue", 99],
                    [Op.APPEND, "text", b"%d " % num_requests],
                    [Op.NUM_KEYS],
                ]
            )
            asked[client].append([num_requests, *change])
            job.deliver(job.hub.received(client, encode(asked[client][-1]), job.now_s))
        for client in clients:
            told[client].update({reply[0]: reply for reply in job.take(client) if reply[0] != NEWS})

    after = Hub(None, votes={})
    assert job.replica.is_synced
    after.take_over(job.replica, 0.0)
    job.hub = after
    for client in clients:
        job.connect(client + 10, names[client])
        assert job.sessions[client + 10] == names[client]
        for request in asked[client]:
            if request[0] not in told[client] or request[1] not in READING:
                again = encode([request[0], -request[1], *request[2:]])
                job.deliver(after.received(client + 10, again, 0.0))
    for client in clients:
        for reply in job.take(client + 10):
            assert told[client].setdefault(reply[0], reply) == reply

    requests = {request[0]: request for client in clients for request in asked[client]}
    replies = {number: reply for client in clients for number, reply in told[client].items()}
    num_adds = sum(request[1] == Op.ADD for request in requests.values())
    sums = sorted(replies[number][2] for number, request in requests.items() if request[1] == Op.ADD)
    assert sums == list(range(1, num_adds + 1))
    values, queues = after.state.copies()
    appended = [b"%d" % number for number, request in requests.items() if request[1] == Op.APPEND]
    assert sorted(values.get("text", b"").split()) == sorted(appended)
    pushed = [request[3] for number, request in requests.items() if request[1] == Op.QUEUE_PUSH and number in replies]
    popped = [
        replies[number][2] for number, request in requests.items() if request[1] == Op.QUEUE_POP and number in replies
    ]
    assert Counter(pushed) == Counter(popped) + Counter(queues.get("queue", []))


def test_an_answer_waits_for_the_standby_and_so_does_what_it_would_give_away() -> None:
    job = Job()
    job.follow()
    job.catch_up()
    job.connect(2)
    job.connect(3)
    job.catch_up()
    job.take(2)
    job.take(3)
    assert job.ask(2, 0, Op.SET, "a", b"1") == []
    assert job.ask(3, 0, Op.CHECK, ["a"]) == []
    job.apply(1)
    assert job.take(2) == [[0, Status.OK, None]]
    assert job.take(3) == [[0, Status.OK, True]]
    assert job.ask(3, 1, Op.CHECK, ["a"]) == [[1, Status.OK, True]]


def test_a_leader_without_word_of_its_standby_goes_on_when_its_patience_is_over() -> None:
    job = Job()
    job.follow()
    job.connect(2)
    job.catch_up()
    assert job.take(2) == [[NEWS, Status.OK, ["other", 7]]]
    job.ask(2, 0, Op.SET, "a", b"1")
    job.hub.disconnected(FOLLOWER, 0.0)
    assert job.hub.next_deadline_s == PATIENCE_S
    job.tick(PATIENCE_S - 0.1)
    assert job.ask(2, 1, Op.NUM_KEYS) == []
    job.tick(PATIENCE_S)
    assert job.take(2) == [[0, Status.OK, None], [1, Status.OK, 1], [NEWS, Status.OK, None]]
    assert job.log[-1] == "goes on without its standby: it has acknowledged nothing in time"


def test_a_leader_that_was_frozen_itself_looks_again() -> None:
    job = Job()
    job.follow()
    job.catch_up()
    job.tick(PATIENCE_S + 1)
    assert job.hub._lead.journal is not None
    job.tick(2 * PATIENCE_S + 1)
    assert job.hub._lead.journal is None


def test_a_leader_that_nobody_can_reach_any_more_does_not_go_on_alone() -> None:
    job = Job()
    job.follow()
    job.connect(2)
    job.catch_up()
    job.take(2)
    job.hub.close()
    job.hub.disconnected(FOLLOWER, 0.0)
    job.ask(2, 0, Op.SET, "a", b"1")
    job.tick(PATIENCE_S)
    assert job.take(2) == []
    assert job.hub.next_deadline_s == SESSION_S, "no timer runs for nothing"


def test_a_standby_that_leaves_is_not_waited_for() -> None:
    job = Job()
    job.follow()
    job.connect(2)
    job.catch_up()
    job.take(2)
    job.ask(FOLLOWER, 9, Op.LEAVE)
    assert job.ask(2, 0, Op.SET, "a", b"1") == []
    job.tick(0.0)
    assert job.take(2) == [[0, Status.OK, None], [NEWS, Status.OK, None]]


def test_a_second_standby_is_refused_and_the_first_may_begin_anew() -> None:
    job = Job()
    job.follow()
    job.catch_up()
    job.connect(2)
    job.catch_up()
    job.take(2)
    assert job.ask(2, 0, Op.FOLLOW, "elsewhere", 7, 1)[0][:2] == [NOT_A_REQUEST, Status.REFUSED]
    assert job.ask(2, 1, Op.FOLLOW, "other", 7, 1)[0][:2] == [NOT_A_REQUEST, Status.REFUSED]
    job.tick(0.0)
    assert job.hub._lead.journal is None
    job.take(2)
    assert job.ask(2, 2, Op.FOLLOW, "other", 7, 0)[0][:2] == [NOT_A_REQUEST, Status.REFUSED]
    assert job.ask(2, 3, Op.FOLLOW, "other", 7, 1)[0][:2] == [0, list(Limits())], "the first entry: the limits"


def test_a_large_state_is_sent_in_windows_and_service_goes_on() -> None:
    job = Job()
    job.connect(2)
    for number in range(3):
        job.ask(2, number, Op.SET, f"big{number}", bytes(WINDOW_BYTES))
    job.follow()
    assert sum(len(encode(entry)) for entry in job.entries) < 1.1 * WINDOW_BYTES
    assert job.ask(2, 3, Op.SET, "meanwhile", b"1") == [[3, Status.OK, None]]
    job.catch_up()
    assert job.replica.is_synced
    assert shape(job.replica.state, job.replica.sessions) == shape(job.hub.state, job.hub._sessions)


def test_what_gathers_while_a_slow_standby_catches_up_has_a_bound() -> None:
    job = Job(Limits(unread_bytes=1000))
    job.connect(2)
    job.ask(2, 0, Op.SET, "big", bytes(WINDOW_BYTES))
    job.follow()
    for number in range(1, 4):
        assert job.ask(2, number, Op.SET, "more", bytes(400)) == [[number, Status.OK, None]]
    assert job.hub._lead.journal is None
    assert job.log == ["goes on without its standby: it is too slow to catch up"]


def test_a_standby_lets_nobody_in_before_it_has_taken_over() -> None:
    hub = Hub(None, votes={})
    ((_, hello, _),) = hub.connected(1, 0.0)
    answer = ClientHandshake(None, "here").answer(Decoder(512).feed(hello)[0])
    ((_, verdict, reason),) = hub.received(1, encode(answer), 0.0)
    assert Decoder(512).feed(verdict) == [[Status.STANDBY, reason]]
