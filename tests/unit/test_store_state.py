"""The server's state machine against a model that keeps everything in plain lists."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disttrain.store.protocol.limits import Limits
from disttrain.store.protocol.state import INT64_MAX, StoreState
from disttrain.store.protocol.wire import Op, Status

KEYS = ["a", "b", "c", "d"]
key_names = st.sampled_from(KEYS)
key_lists = st.lists(key_names, max_size=4)
connections = st.integers(0, 3)
timeouts = st.sampled_from([1, 2.5, 10])
values = st.sampled_from([b"", b"7", b"x"])


class StateAgainstModel(RuleBasedStateMachine):
    """The model answers each request by its definition; who waits stands in one list, looked through each time."""

    def __init__(self) -> None:
        super().__init__()
        self.state = StoreState()
        self.now_s = 100.0
        self.num_requests = 0
        self.values: dict[str, bytes] = {}
        self.waiting: list[tuple[int, int, Op, list[str], float]] = []  # connection, request, op, keys, deadline
        self.barriers: dict[str, list[tuple[int, int, float]]] = {}
        self.watching: list[tuple[int, int, str, bytes | None, float]] = []
        self.queues: dict[str, list[bytes]] = {}
        self.popping: list[tuple[int, int, str, float]] = []
        self.pushing: list[tuple[int, int, str, float, bytes]] = []

    def ask(self, connection: int, op: Op, *arguments: Any) -> dict[tuple[int, int], list[Any]]:
        self.num_requests += 1
        replies = self.state.handle(connection, [self.num_requests, op, *arguments], self.now_s)
        answers = {(target, reply[0]): reply[1:] for target, reply in replies}
        assert len(answers) == len(replies), "an answer was given twice"
        return answers

    def check(self, connection: int, op: Op, arguments: list[Any], expected: Any) -> None:
        """The reply itself is `expected`; the others are those of requests that `self.values` now satisfies."""
        answers = self.ask(connection, op, *arguments)
        assert answers.pop((connection, self.num_requests)) == [Status.OK, expected]
        self.check_woken(answers)

    def check_woken(self, answers: dict[tuple[int, int], list[Any]]) -> None:
        expected = self.woken_by_keys()
        changed = [entry for entry in self.watching if self.values.get(entry[2]) != entry[3]]
        self.watching = [entry for entry in self.watching if entry not in changed]
        expected |= {entry[:2]: [Status.OK, self.values.get(entry[2])] for entry in changed}
        assert answers == expected

    def woken_by_keys(self) -> dict[tuple[int, int], list[Any]]:
        ready = [entry for entry in self.waiting if all(self.is_there(key, entry[2]) for key in entry[3])]
        self.waiting = [entry for entry in self.waiting if entry not in ready]
        return {entry[:2]: [Status.OK, self.value_of(entry[2], entry[3])] for entry in ready}

    def is_there(self, key: str, op: Op) -> bool:
        """A queue that holds a value counts for those who ask for no value."""
        return key in self.values or (op in (Op.CHECK, Op.WAIT) and bool(self.queues.get(key)))

    def value_of(self, op: Op, keys: list[str]) -> Any:
        found = [self.values.get(key) for key in keys]
        return {Op.GET: found[:1], Op.WAIT: [None], Op.MULTI_GET: [found]}[op][0]

    @rule(connection=connections, key=key_names, value=values)
    def set(self, connection: int, key: str, value: bytes) -> None:
        self.values[key] = value
        self.check(connection, Op.SET, [key, value], None)

    @rule(connection=connections, key=key_names, value=values)
    def append(self, connection: int, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value
        self.check(connection, Op.APPEND, [key, value], None)

    @rule(connection=connections, key=key_names, amount=st.integers(-5, 5))
    def add(self, connection: int, key: str, amount: int) -> None:
        text = self.values.get(key, b"0")
        if not re.fullmatch(rb"-?\d{1,19}", text):
            answers = self.ask(connection, Op.ADD, key, amount)
            assert answers.pop((connection, self.num_requests))[0] == Status.REFUSED
            assert not answers
            return
        self.values[key] = str(int(text) + amount).encode()
        self.check(connection, Op.ADD, [key, amount], int(text) + amount)

    @rule(connection=connections, key=key_names, expected=values, desired=values)
    def compare_set(self, connection: int, key: str, expected: bytes, desired: bytes) -> None:
        before = self.values.get(key)
        result = expected if before is None else before
        if before == expected or (before is None and expected == b""):
            self.values[key] = result = desired
        self.check(connection, Op.COMPARE_SET, [key, expected, desired], result)

    @rule(connection=connections, pairs=st.lists(st.tuples(key_names, values), max_size=4))
    def multi_set(self, connection: int, pairs: list[tuple[str, bytes]]) -> None:
        self.values.update(pairs)
        self.check(connection, Op.MULTI_SET, [[key for key, _ in pairs], [value for _, value in pairs]], None)

    @rule(connection=connections, key=key_names)
    def delete_key(self, connection: int, key: str) -> None:
        self.check(connection, Op.DELETE_KEY, [key], self.values.pop(key, None) is not None)

    @rule(connection=connections, keys=key_lists)
    def ask_what_never_waits(self, connection: int, keys: list[str]) -> None:
        self.check(connection, Op.CHECK, [keys], all(self.is_there(key, Op.CHECK) for key in keys))
        self.check(connection, Op.NUM_KEYS, [], len(self.values))
        self.check(connection, Op.LIST_KEYS, [""], sorted(self.values))

    @rule(connection=connections, key=key_names, timeout_s=timeouts)
    def get(self, connection: int, key: str, timeout_s: float) -> None:
        self.wait_for(connection, Op.GET, [key], key, timeout_s)

    @rule(connection=connections, op=st.sampled_from([Op.WAIT, Op.MULTI_GET]), keys=key_lists, timeout_s=timeouts)
    def wait(self, connection: int, op: Op, keys: list[str], timeout_s: float) -> None:
        self.wait_for(connection, op, keys, keys, timeout_s)

    def wait_for(self, connection: int, op: Op, keys: list[str], argument: Any, timeout_s: float) -> None:
        answers = self.ask(connection, op, argument, timeout_s)
        self.waiting.append((connection, self.num_requests, op, keys, self.now_s + timeout_s))
        self.check_woken(answers)

    @rule(connection=connections, key=key_names, seen=st.none() | values, timeout_s=timeouts)
    def watch(self, connection: int, key: str, seen: bytes | None, timeout_s: float) -> None:
        answers = self.ask(connection, Op.WATCH, key, seen, timeout_s)
        self.watching.append((connection, self.num_requests, key, seen, self.now_s + timeout_s))
        self.check_woken(answers)

    @rule(connection=connections, name=key_names, value=values, timeout_s=timeouts)
    def push_where_two_fit(self, connection: int, name: str, value: bytes, timeout_s: float) -> None:
        answers = self.ask(connection, Op.QUEUE_PUSH, name, value, 2, timeout_s)
        self.pushing.append((connection, self.num_requests, name, self.now_s + timeout_s, value))
        self.check_queue(answers, name)

    @rule(connection=connections, name=key_names, timeout_s=timeouts)
    def pop(self, connection: int, name: str, timeout_s: float) -> None:
        answers = self.ask(connection, Op.QUEUE_POP, name, timeout_s)
        self.popping.append((connection, self.num_requests, name, self.now_s + timeout_s))
        self.check_queue(answers, name)

    @rule(connection=connections, name=key_names)
    def pop_without_waiting(self, connection: int, name: str) -> None:
        assert self.ask(connection, Op.QUEUE_LEN, name) == {
            (connection, self.num_requests): [Status.OK, len(self.queues.get(name, []))]
        }
        if not self.queues.get(name):
            (answer,) = self.ask(connection, Op.QUEUE_POP, name, 0).values()
            assert answer[0] == Status.EMPTY

    def check_queue(self, answers: dict[tuple[int, int], list[Any]], name: str) -> None:
        """Let values in and out, first come first served, until nothing moves."""
        queue = self.queues.setdefault(name, [])
        expected: dict[tuple[int, int], list[Any]] = {}
        while True:
            pushing = [entry for entry in self.pushing if entry[2] == name]
            popping = [entry for entry in self.popping if entry[2] == name]
            if popping and queue:
                expected[popping[0][:2]] = [Status.OK, queue.pop(0)]
                self.popping.remove(popping[0])
            elif pushing and len(queue) < 2:
                expected[pushing[0][:2]] = [Status.OK, None]
                queue.append(pushing[0][4])
                self.pushing.remove(pushing[0])
            else:
                break
        assert answers == expected | self.woken_by_keys()

    @rule(connection=connections, ago=st.integers(0, 5))
    def cancel(self, connection: int, ago: int) -> None:
        request_id = max(self.num_requests - ago, 0)
        is_parked = (connection, request_id) in self.parked()
        assert self.ask(connection, Op.CANCEL, request_id) == {(connection, self.num_requests): [Status.OK, is_parked]}
        self.forget({(connection, request_id)})

    def parked(self) -> dict[tuple[int, int], float]:
        """The deadline of each request that waits."""
        found = {entry[:2]: entry[4] for entry in self.waiting}
        found |= {member[:2]: member[2] for members in self.barriers.values() for member in members}
        found |= {entry[:2]: entry[4] for entry in self.watching}
        found |= {entry[:2]: entry[3] for entry in self.popping}
        found |= {entry[:2]: entry[3] for entry in self.pushing}
        return found

    @rule(connection=connections, name=key_names, timeout_s=timeouts)
    def barrier_of_three(self, connection: int, name: str, timeout_s: float) -> None:
        answers = self.ask(connection, Op.BARRIER, name, 3, timeout_s)
        members = self.barriers.setdefault(name, [])
        members.append((connection, self.num_requests, self.now_s + timeout_s))
        if len(members) < 3:
            assert answers == {}
        else:
            assert answers == {member[:2]: [Status.OK, None] for member in members}
            del self.barriers[name]

    @rule(step_s=st.sampled_from([0.5, 1.0, 3.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        late = {request for request, deadline_s in self.parked().items() if deadline_s <= self.now_s}
        replies = self.state.expire(self.now_s)
        assert {(connection, reply[0]) for connection, reply in replies} == late
        assert all(reply[1] == Status.TIMEOUT for _, reply in replies)
        self.forget(late)

    @rule(connection=connections)
    def disconnect(self, connection: int) -> None:
        self.state.disconnect(connection)
        self.forget({request for request in self.parked() if request[0] == connection})

    def forget(self, requests: set[tuple[int, int]]) -> None:
        self.waiting = [entry for entry in self.waiting if entry[:2] not in requests]
        self.watching = [entry for entry in self.watching if entry[:2] not in requests]
        self.popping = [entry for entry in self.popping if entry[:2] not in requests]
        self.pushing = [entry for entry in self.pushing if entry[:2] not in requests]
        for name, members in list(self.barriers.items()):
            self.barriers[name] = [member for member in members if member[:2] not in requests]
            if not self.barriers[name]:
                del self.barriers[name]

    @invariant()
    def nothing_is_left_behind(self) -> None:
        deadlines = list(self.parked().values())
        num_parked = len(deadlines)
        assert self.state.num_parked == num_parked
        num_values = len(self.values) + sum(map(len, self.queues.values()))
        assert self.state._num_values == num_values
        num_bytes = sum(len(key) + len(value) for key, value in self.values.items())
        assert self.state._total_bytes == num_bytes + sum(
            len(value) for queue in self.queues.values() for value in queue
        )
        if deadlines:
            assert self.state.next_deadline_s is not None
            assert self.state.next_deadline_s <= min(deadlines)
        if not num_parked:
            assert not self.state._waiting
            assert not self.state._barriers
            assert not self.state._parking._of
            assert not self.state._queues._poppers
            assert not self.state._queues._pushers


TestStateAgainstModel = StateAgainstModel.TestCase
TestStateAgainstModel.settings = settings(max_examples=25, stateful_step_count=30)


def answers(state: StoreState, *requests: list[Any], now_s: float = 0.0) -> list[list[Any]]:
    return [reply for request in requests for _, reply in state.handle(1, request, now_s)]


def test_a_wait_goes_on_when_a_key_that_came_was_deleted_again() -> None:
    state = StoreState()
    assert answers(state, [1, Op.WAIT, ["a", "b"], 9], [2, Op.SET, "a", b""], [3, Op.DELETE_KEY, "a"]) == [
        [2, 0, None],
        [3, 0, True],
    ]
    assert answers(state, [4, Op.SET, "b", b""]) == [[4, 0, None]]
    assert answers(state, [5, Op.SET, "a", b""]) == [[5, 0, None], [1, 0, None]]


def test_timeouts_name_what_is_missing() -> None:
    state = StoreState()
    answers(state, [1, Op.SET, "here", b""])
    answers(state, [2, Op.GET, "x", 1], [3, Op.WAIT, ["here", "y", "z"], 2], [4, Op.BARRIER, "go", 3, 3])
    assert state.next_deadline_s == 1
    assert [reply for _, reply in state.expire(3.0)] == [
        [2, Status.TIMEOUT, "key 'x' did not come within 1 s (wait timeout after 1000ms, keys: /x)."],
        [3, Status.TIMEOUT, "2 of 3 keys did not come within 2 s: 'y', 'z' (wait timeout after 2000ms, keys: /y, /z)."],
        [4, Status.TIMEOUT, "1 of 3 members came to barrier 'go' within 3 s."],
    ]
    assert state.next_deadline_s is None


def test_a_long_list_of_missing_keys_is_cut() -> None:
    state = StoreState()
    answers(state, [1, Op.WAIT, [f"k{number:03}" for number in range(100)], 1])
    text = state.expire(1.0)[0][1][2]
    assert text.startswith("100 of 100 keys did not come within 1 s: 'k000', ")
    assert text.endswith(
        "'k007' and 92 more (wait timeout after 1000ms, keys: " + ", ".join(f"/k00{i}" for i in range(8)) + ")."
    )


def test_limits_are_named_and_nothing_changes() -> None:
    state = StoreState(Limits(key_bytes=8, value_bytes=10, frame_bytes=60, unread_bytes=100))
    key, value, _, frame, num_keys = answers(
        state,
        [1, Op.SET, "k" * 9, b""],
        [2, Op.MULTI_SET, ["a", "b"], [b"x" * 10, b"x" * 11]],
        [3, Op.SET, "d", b"x" * 10],
        [4, Op.MULTI_GET, ["d", "d"], 1],
        [5, Op.NUM_KEYS],
    )
    assert [key[1], value[1], frame[1]] == [Status.LIMIT] * 3
    assert "9 bytes; the limit is 8 (DISTTRAIN_STORE_MAX_KEY_BYTES)" in key[2]
    assert "11 bytes; the limit is 10 (DISTTRAIN_STORE_MAX_VALUE_BYTES)" in value[2]
    assert "62 bytes; the limit is 60 (DISTTRAIN_STORE_MAX_FRAME_BYTES)" in frame[2]
    assert num_keys == [5, 0, 1]


def test_a_key_is_measured_in_bytes() -> None:
    state = StoreState(Limits(key_bytes=8))
    assert answers(state, [1, Op.CHECK, ["äöüß"]]) == [[1, 0, False]]
    assert answers(state, [2, Op.CHECK, ["äöüß!"]])[0][1] == Status.LIMIT


def test_append_over_the_limit_keeps_the_value() -> None:
    state = StoreState(Limits(value_bytes=10))
    assert [reply[1] for reply in answers(state, [1, Op.APPEND, "k", b"123456"], [2, Op.APPEND, "k", b"12345"])] == [
        0,
        2,
    ]
    assert answers(state, [3, Op.GET, "k", 1]) == [[3, 0, b"123456"]]


@pytest.mark.parametrize(
    ("value", "amount"), [(b"", 1), (b"x", 1), (b"1.5", 1), (b"9" * 30, 1), (str(INT64_MAX).encode(), 1)]
)
def test_add_refuses_what_is_no_counter(value: bytes, amount: int) -> None:
    state = StoreState()
    assert [reply[1] for reply in answers(state, [1, Op.SET, "k", value], [2, Op.ADD, "k", amount])] == [
        0,
        Status.REFUSED,
    ]
    assert answers(state, [3, Op.GET, "k", 1]) == [[3, 0, value]]


def test_callers_of_one_barrier_must_agree_on_its_size() -> None:
    state = StoreState()
    assert answers(state, [1, Op.BARRIER, "go", 3, 9]) == []
    assert answers(state, [2, Op.BARRIER, "go", 2, 9]) == [
        [2, Status.REFUSED, "barrier 'go' waits for 3 members; this caller says 2."]
    ]


def test_deadlines_of_answered_requests_do_not_pile_up() -> None:
    state = StoreState()
    for number in range(2000):
        answers(state, [number, Op.GET, f"k{number}", 300], [number, Op.SET, f"k{number}", b""])
    assert state.num_parked == 0
    assert len(state._parking._deadlines) < 100


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 15) | anything, st.lists(anything, max_size=4)), max_size=8))
def test_any_request_gets_one_answer_or_is_parked(requests: list[tuple[Any, list[Any]]]) -> None:
    state = StoreState()
    answered = 0
    for number, (op, arguments) in enumerate(requests):
        answered += len(state.handle(0, [number, op, *arguments], 0.0))
    assert answered + state.num_parked == len(requests)


@settings(max_examples=30)
@given(st.lists(anything, max_size=3))
def test_a_request_without_head_is_refused(request: list[Any]) -> None:
    for _, reply in StoreState().handle(0, request, 0.0):
        assert reply[1] in (Status.OK, Status.REFUSED)


@pytest.mark.parametrize("head", [[1], [1, Op.GET, "k"]])
def test_what_is_nested_too_deeply_to_be_shown_is_refused(head: list[Any]) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    ((_, reply),) = StoreState().handle(0, [*head, deep], 0.0)
    assert reply[:2] == [1, Status.REFUSED]
    assert "a list" in reply[2]
