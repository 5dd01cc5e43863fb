"""A store with a standby when peers, clocks and networks behave badly: one store answers, and nobody loses its way."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.store.connection.dial import Dialer
from disttrain.store.protocol.handshake import ServerHandshake, SessionGoneError, to_address
from disttrain.store.protocol.sessions import ASLEEP_S, SESSION_S
from disttrain.store.protocol.wire import NEWS, NOT_A_REQUEST, PROTOCOL_VERSION, Decoder, Op, Status, encode
from disttrain.store.serving.hub import Hub
from disttrain.store.standby.follower import Follower, Following
from disttrain.store.standby.journal import FRESH
from disttrain.store.standby.replica import Replica
from disttrain.store.standby.succession import Side, may_take_over
from tests.unit.test_store_standby import FOLLOWER, PATIENCE_S, Job

HOST = "127.0.0.1"


def job_with_standby() -> Job:
    job = Job()
    job.follow()
    job.connect(2)
    job.catch_up()
    job.take(2)
    return job


def beat(job: Job, number: int) -> None:
    job.ask(FOLLOWER, 0, Op.ACK, job.replica.num_entries, number)


def test_a_leader_that_was_frozen_answers_no_read_before_the_standby_says_that_it_still_follows() -> None:
    """Another may be the store by now, and know better."""
    job = job_with_standby()
    assert job.ask(2, 0, Op.NUM_KEYS) == [[0, Status.OK, 0]]
    job.now_s = 10 * PATIENCE_S
    assert job.ask(2, 1, Op.NUM_KEYS) == []
    job.catch_up()
    assert job.take(2) == [[1, Status.OK, 0]]
    assert job.ask(2, 2, Op.NUM_KEYS) == [[2, Status.OK, 0]]


def test_late_acknowledgements_prove_nothing_about_now() -> None:
    job = job_with_standby()
    beat(job, 1)
    late = list(job.entries)
    assert late
    job.now_s = 10 * PATIENCE_S
    job.catch_up()
    assert job.ask(2, 0, Op.NUM_KEYS) == []


def test_late_acknowledgements_of_what_was_on_its_way_prove_nothing_either() -> None:
    job = job_with_standby()
    assert job.ask(2, 0, Op.SET, "a", b"1") == []
    job.now_s = 10 * PATIENCE_S
    assert job.ask(2, 1, Op.CHECK, ["a"]) == []
    job.apply(1)
    assert job.take(2) == [[0, Status.OK, None]]
    job.catch_up()
    assert job.take(2) == [[1, Status.OK, True]]


def test_reads_cost_nothing_while_the_standby_beats() -> None:
    job = job_with_standby()
    for number in range(1, 20):
        beat(job, number)
        job.catch_up()
        job.now_s += 0.9 * FRESH * PATIENCE_S
        assert job.ask(2, number, Op.NUM_KEYS) == [[number, Status.OK, 0]]


def test_a_vote_does_not_count_while_the_leader_may_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("disttrain.store.standby.follower.time.monotonic", lambda: now_s)
    votes = {b"a": (1, now_s)}
    follower = Follower(Following(HOST, 1, HOST, PATIENCE_S), 2, None, None, votes)
    replica = Replica()
    replica.term, replica.electors = 1, [b"a"]
    follower._heard_s = now_s
    assert not follower._is_elected(replica)
    now_s += FRESH * PATIENCE_S
    assert not follower._is_elected(replica)
    now_s += FRESH * PATIENCE_S
    assert follower._is_elected(replica)


def test_sides_that_are_taken_after_the_leader_has_gone_on_alone_are_of_no_use_to_its_standby() -> None:
    job = job_with_standby()
    elector = Side()

    def ask() -> None:
        ((_, _, told),) = job.ask(2, 0, Op.ELECT, elector.for_leader, elector.for_standby)
        elector.heard(*told)

    ask()
    job.catch_up()
    job.tick(PATIENCE_S)
    ask()
    beat(job, 1)
    # The term is renewed, and the standby knows that, but its word does not arrive.
    ask()
    for entry in job.entries:
        job.replica.apply(entry)
    job.tick(3 * PATIENCE_S)
    job.tick(4 * PATIENCE_S)
    job.take(2)
    ask()
    assert job.hub._lead.journal is None
    ask()
    elector.lost()
    votes = {job.sessions[2]: elector.for_standby}
    assert job.replica.electors == list(votes)
    assert not may_take_over(job.replica.term, job.replica.electors, votes)


def test_a_client_that_sleeps_while_the_standby_takes_over_is_known_when_it_wakes() -> None:
    """A rank that trains asks nothing for a long time."""
    job = job_with_standby()
    after = Hub(None, votes={})
    after.take_over(job.replica, 0.0)
    job.hub, name = after, job.sessions[2]
    job.tick(10 * SESSION_S)
    assert job.connect(12, name) == name
    job.hub.disconnected(12, job.now_s)
    job.tick(job.now_s + SESSION_S)
    assert job.connect(13, name) == b""
    job.tick(ASLEEP_S)
    assert not job.hub._sessions._of


def test_one_that_was_hung_up_on_is_told_nothing_more() -> None:
    job = job_with_standby()
    journal = job.hub._lead.journal
    assert journal is not None
    journal.resign("it begins anew", 0.0)
    actions = job.hub.tick(0.0)
    to_follower = [reason for connection, _, reason in actions if connection == FOLLOWER]
    assert to_follower == ["it begins anew"]


@pytest.mark.parametrize(
    "standby",
    [
        ["", 7],
        ["a" * 254, 7],
        ["a..b", 7],
        ["a\0b", 7],
        ["other", 0],
        ["other", -1],
        ["other", 1 << 16],
        [b"other", 7],
        ["other", "7"],
        ["other"],
        None,
    ],
)
def test_an_address_that_nobody_could_connect_to_reaches_no_client(standby: Any) -> None:
    assert to_address(standby) is None
    job = Job()
    job.connect(2)
    told = job.ask(2, 0, Op.FOLLOW, *(standby or []), PATIENCE_S)
    assert told[0][:2] == [NOT_A_REQUEST, Status.REFUSED]
    assert job.hub._lead.journal is None


@pytest.mark.parametrize("patience_s", [0, -1, float("inf"), float("nan"), 1 << 63, "4"])
def test_a_standby_may_not_ask_to_be_borne_with_for_ever(patience_s: Any) -> None:
    job = Job()
    job.connect(2)
    assert job.ask(2, 0, Op.FOLLOW, "other", 7, patience_s)[0][:2] == [NOT_A_REQUEST, Status.REFUSED]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
NEW_OPS = st.sampled_from([Op.FOLLOW, Op.ACK, Op.ELECT, Op.CANCEL, Op.LEAVE])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([FOLLOWER, 2, 3]),
            st.integers(0, 3) | VALUES,
            NEW_OPS | NEW_OPS.map(lambda op: -op),
            st.lists(VALUES, max_size=4) | st.tuples(st.just("other"), st.just(7), st.just(PATIENCE_S)).map(list),
        ),
        max_size=12,
    )
)
def test_whatever_a_client_says_about_standbys_the_hub_goes_on(requests: list[Any]) -> None:
    hub = Hub(None)
    answer = [PROTOCOL_VERSION, b"", b"", b"", 0]
    for connection in (FOLLOWER, 2, 3):
        hub.connected(connection, 0.0)
        hub.received(connection, encode(answer), 0.0)
    now_s = 0.0
    for connection, request_id, op, arguments in requests:
        now_s += 0.5
        hub.received(connection, encode([request_id, int(op), *arguments]), now_s)
        hub.tick(now_s)
    for connection in (FOLLOWER, 2, 3):
        hub.disconnected(connection, now_s)
    for _ in range(400):
        now_s += 0.5
        hub.tick(now_s)
    hub.connected(9, now_s)
    told = hub.received(9, encode(answer), now_s)
    # Electors that left with the standby can't consent any more.
    assert hub.is_deposed or Decoder(512).feed(told[0][1])[0][0] == Status.OK


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(60.0)
        yield listener


def test_news_right_behind_the_welcome_are_heard(listener: socket.socket) -> None:
    def serve() -> None:
        with listener.accept()[0] as peer:
            handshake = ServerHandshake(None)
            peer.sendall(encode(handshake.hello()))
            verdict = handshake.verdict(Decoder(512).feed(peer.recv(512))[0], 1 << 20)
            peer.sendall(encode(verdict) + encode([NEWS, 0, ["other", 7]]))
            peer.recv(1)

    server = threading.Thread(target=serve)
    server.start()
    dialer = Dialer(HOST, listener.getsockname()[1], None)
    dialer.dial(20.0).socket.close()
    assert dialer.standby == ("other", 7)
    server.join()


def test_a_standby_that_is_refused_does_not_ask_again_at_once(listener: socket.socket) -> None:
    num_times = 0

    def serve() -> None:
        nonlocal num_times
        listener.settimeout(1.0)
        while True:
            try:
                peer = listener.accept()[0]
            except TimeoutError:
                return
            with peer:
                num_times += 1
                handshake = ServerHandshake(None)
                peer.sendall(encode(handshake.hello()))
                peer.sendall(encode(handshake.verdict(Decoder(512).feed(peer.recv(512))[0], 1 << 20)))
                peer.recv(512)
                peer.sendall(encode([NOT_A_REQUEST, int(Status.REFUSED), "there is a standby"]))

    server = threading.Thread(target=serve)
    server.start()
    follower = Follower(Following(HOST, listener.getsockname()[1], HOST), 7, None, None, {})
    thread = threading.Thread(target=follower.run)
    thread.start()
    thread.join(1.0)
    follower.close()
    thread.join(60.0)
    server.join(60.0)
    assert 1 < num_times < 20


def test_a_name_with_a_silent_address_and_one_that_refuses_is_not_proven_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    def create_connection(address: object, timeout: float, *, all_errors: bool = False) -> None:
        raise ExceptionGroup("", [TimeoutError("silent"), refused]) if all_errors else refused

    monkeypatch.setattr(socket, "create_connection", create_connection)
    with pytest.raises(TimeoutError):
        Dialer("both", 7, None).attempt(1e9)


@pytest.mark.parametrize("status", [Status.GONE, Status.REFUSED])
def test_who_has_taken_the_dead_leaders_address_does_not_keep_a_client_from_the_standby(
    listener: socket.socket, status: Status
) -> None:
    def serve() -> None:
        for told in ([int(status), "no such client"], []):
            with listener.accept()[0] as peer:
                handshake = ServerHandshake(None)
                peer.sendall(encode(handshake.hello()))
                verdict = handshake.verdict(Decoder(512).feed(peer.recv(512))[0], 1 << 20)
                peer.sendall(encode(told or verdict))
                peer.recv(1)

    server = threading.Thread(target=serve)
    server.start()
    port = listener.getsockname()[1]
    dialer = Dialer(HOST, port, None, standby=(HOST, port))
    dialer.attempt(time.monotonic() + 60.0).socket.close()
    server.join()


def test_a_standby_does_not_follow_another_store_at_the_dead_leaders_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(*_: object) -> None:
        raise SessionGoneError("connect", "the server knows no such client.")

    follower = Follower(Following(HOST, 1, HOST, PATIENCE_S), 2, None, None, {})
    monkeypatch.setattr("disttrain.store.standby.follower.Dialer.attempt", attempt)
    replica = Replica()
    replica.is_synced = True
    follower._lease_s = time.monotonic() + PATIENCE_S
    assert follower._reached(replica) is None
