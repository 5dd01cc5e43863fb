"""Adds, arrivals at barriers and sets that a proxy sends together, each with an answer of its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.state import StoreState
from disttrain.store.protocol.wire import COUNTED, Decoder, Message, Op, Status, encode
from disttrain.store.proxy.hub import ProxyHub
from tests.state_machines.proxied_store import FRAME_BYTES, Line


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


@pytest.mark.parametrize("num_clients", [8, 64])
def test_adds_to_counters_of_their_own_are_one_request(num_clients: int) -> None:
    """Also where two add to one counter."""
    names = ["rank/0" if number == 2 else f"rank/{number}" for number in range(num_clients)]
    num_requests, replies = _adds(StoreState(), names)
    assert num_requests == [1]
    assert replies == [[Status.OK, 2 if number == 2 else 1] for number in range(num_clients)]


def test_of_adds_together_one_to_what_is_no_number_fails_alone() -> None:
    server = StoreState()
    server.handle(0, [0, Op.SET, "rank/1", b"text"], 0.0)
    num_requests, replies = _adds(server, ["rank/0", "rank/1", "rank/2"])
    assert num_requests == [1, 3]
    assert [status for status, _ in replies] == [Status.OK, Status.REFUSED, Status.OK]
    assert server.copies()[0] == {"rank/0": b"1", "rank/1": b"text", "rank/2": b"1"}


@pytest.mark.parametrize("num_clients", [8, 64])
def test_adds_of_long_names_are_in_as_many_requests_as_have_room(num_clients: int) -> None:
    num_requests, replies = _adds(StoreState(), [f"{number:01000}" for number in range(num_clients)])
    assert num_requests == [num_clients // 4]
    assert replies == [[Status.OK, 1]] * num_clients


def _adds(server: StoreState, names: list[str]) -> tuple[list[int], list[Message]]:
    """Of clients of one proxy that each add 1 to a counter: the requests to the server by round, and their replies."""
    proxy = ProxyHub(None, Limits())
    lines = [Line(proxy, itertools.count(100 * number + 1)) for number in range(len(names))]
    for line, name in zip(lines, names, strict=True):
        line.connect(0.0)
        proxy.received(line.connection, encode([7, int(Op.ADD), name, 1]), 0.0)
    num_requests, replies = [], {}
    while requests := Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames())):
        num_requests.append(len(requests))
        for request in requests:
            for connection, data, _ in proxy.answered([reply for _, reply in server.handle(1, request, 0.0)]):
                replies[connection] = Decoder(FRAME_BYTES).feed(data)[0][1:]
    return num_requests, [replies[line.connection] for line in lines]


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


@pytest.mark.parametrize("num_clients", [8, 64])
def test_sets_that_follow_each_other_are_one_request(num_clients: int) -> None:
    """Each rank says where it is: one request of a node, however many ranks it has."""
    proxy, server = ProxyHub(None, Limits()), StoreState()
    lines = [Line(proxy, itertools.count(100 * number + 1)) for number in range(num_clients)]
    for line in lines:
        line.connect(0.0)
        proxy.received(line.connection, encode([7, int(Op.SET), f"host/{line.connection}", b"here"]), 0.0)
    (request,) = Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames()))
    assert request[1] == Op.MULTI_SET
    told = proxy.answered([reply for _, reply in server.handle(1, request, 0.0)])
    assert {connection: Decoder(FRAME_BYTES).feed(data) for connection, data, _ in told} == {
        line.connection: [[7, 0, None]] for line in lines
    }
    assert server.copies()[0] == {f"host/{line.connection}": b"here" for line in lines}


@pytest.mark.parametrize("is_frame", [False, True])
def test_sets_of_which_one_is_too_large_go_apart(is_frame: bool) -> None:
    """For the server, or for one frame to it: the others come through."""
    proxy, server = ProxyHub(None, Limits()), StoreState(Limits(value_bytes=10))
    proxy.forwarding.frame_bytes = 60 if is_frame else FRAME_BYTES
    lines = [Line(proxy, itertools.count(100 * number + 1)) for number in range(3)]
    statuses: dict[int, int] = {}
    for number, line in enumerate(lines):
        line.connect(0.0)
        value = b"x" * (50 if number == 1 else 2)
        proxy.received(line.connection, encode([number, int(Op.SET), f"key{number}", value]), 0.0)
    for _ in range(2):
        requests = Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames()))
        actions = proxy.refused()
        for request in requests:
            actions += proxy.answered([reply for _, reply in server.handle(1, request, 0.0)])
        for connection, data, _ in actions:
            statuses[connection] = Decoder(FRAME_BYTES).feed(data)[0][1]
    assert [statuses[line.connection] for line in lines] == [Status.OK, Status.LIMIT, Status.OK]
    assert server.copies()[0] == {"key0": b"xx", "key2": b"xx"}


@given(st.integers(-5, 5), st.lists(st.sampled_from([1, -3, (1 << 62), -(1 << 62)]), min_size=1, max_size=6))
def test_adds_together_are_adds_one_after_the_other(first: int, amounts: list[int]) -> None:
    together, apart = StoreState(), StoreState()
    for state in (together, apart):
        state.handle(0, [0, Op.ADD, "sum", first], 0.0)
    ((_, (_, status, totals)),) = together.handle(0, [1, Op.ADD_EACH, ["sum"] * len(amounts), amounts], 0.0)
    replies = [apart.handle(0, [1, Op.ADD, "sum", amount], 0.0)[0][1] for amount in amounts]
    if status == Status.OK:
        assert [[1, 0, total] for total in totals] == replies
        assert together.copies() == apart.copies()
    else:
        assert status == Status.APART
        assert any(reply[1] == Status.REFUSED for reply in replies)


@pytest.mark.parametrize(
    "body", [[Op.ADD_EACH, ["a"], []], [Op.ADD_EACH, ["a", "b"], [1, "2"]], [Op.BARRIER_EACH, "b", 2, 1.0, 0]]
)
def test_what_makes_no_sense_together_is_refused(body: list[Any]) -> None:
    ((_, reply),) = StoreState().handle(0, [0, *body], 0.0)
    assert reply[1] == Status.REFUSED


def test_equal_changes_that_may_be_done_twice_go_as_one() -> None:
    proxy = ProxyHub(None, Limits())
    lines = [Line(proxy, itertools.count(100 * number + 1)) for number in range(3)]
    for line in lines:
        line.connect(0.0)
    for number, request in enumerate(
        ([Op.COMPARE_SET, "terms", b"", b"x"], [Op.SET, "all", b""], [Op.APPEND, "log", b"x"], [Op.DELETE_KEY, "all"])
    ):
        for line in lines:
            proxy.received(line.connection, encode([number, *request]), 0.0)
    sent = Decoder(FRAME_BYTES).feed(b"".join(proxy.forwarding.frames()))
    assert [request[1] for request in sent] == [Op.COMPARE_SET, Op.SET, *[Op.APPEND] * 3, *[Op.DELETE_KEY] * 3]
    actions = proxy.answered([[sent[0][0], 0, b"x"]])
    assert [Decoder(FRAME_BYTES).feed(data) for _, data, _ in actions] == [[[0, 0, b"x"]]] * 3
