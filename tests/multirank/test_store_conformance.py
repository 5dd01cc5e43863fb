"""One suite that every store passes: TCPStore on each engine, and by a proxy, FileStore, HashStore, a PrefixStore over
each."""

from __future__ import annotations

import functools
import importlib.util
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from disttrain.errors import (
    SettingError,
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    StoreQueueEmptyError,
    StoreTimeoutError,
)
from disttrain.store import FileStore, HashStore, PrefixStore, ServerProcess, Store, TCPStore, new_token, spawn_server
from disttrain.store.proxy.address import UpstreamAddress
from disttrain.store.serving import process
from tests.forkserver.process import ForkedProcess, ForkServer

ENGINES = [engine for engine in ("pyuv", "uvloop") if importlib.util.find_spec(engine)]
KINDS = [*(f"{way}-{engine}" for way in ("tcp", "proxy") for engine in ENGINES), "tls", "file", "hash"]
SOON_S = 0.05
LONG_S = 30.0


@pytest.fixture(autouse=True, scope="module")
def forked_servers(launcher_fork_server: ForkServer) -> Iterator[None]:
    """Servers are forked from one that has loaded what they do: each test has its own."""
    start = functools.partial(ForkedProcess[bytes], launcher_fork_server)
    stand_in = SimpleNamespace(Popen=lambda command, **options: start(command[1:], **options))
    with mock.patch.object(process, "subprocess", stand_in):
        yield


@pytest.fixture(params=[*KINDS, *(f"prefix-{kind}" for kind in KINDS)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    kind = request.param.removeprefix("prefix-")
    inner: Store
    servers: list[ServerProcess] = []
    if kind == "file":
        inner = FileStore(tmp_path / "store", timeout=LONG_S)
    elif kind == "hash":
        inner = HashStore(LONG_S)
    elif kind.startswith("proxy-"):
        monkeypatch.setenv("DISTTRAIN_STORE_ENGINE", kind.removeprefix("proxy-"))
        token = new_token()
        behind = spawn_server("127.0.0.1", 0, token)
        upstream = UpstreamAddress("127.0.0.1", behind.port)
        proxy = spawn_server(f"@disttrain-{new_token()[:16]}", 0, token, upstream=upstream)
        inner = TCPStore(proxy.host, proxy.port, timeout=LONG_S, token=token)
        servers += [proxy, behind]
    else:
        if kind == "tls":
            request.getfixturevalue("tls_settings")
        else:
            monkeypatch.setenv("DISTTRAIN_STORE_ENGINE", kind.removeprefix("tcp-"))
        inner = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG_S, token=new_token())
    yield PrefixStore("inside", inner) if request.param.startswith("prefix-") else inner
    inner.close()
    for server in servers:
        server.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_values_come_back_as_bytes(store: Store) -> None:
    store.set("a", "text ü")
    store.set("b", b"\x00\xff")
    store.set("empty", b"")
    assert store.get("a") == "text ü".encode()
    assert store.get("b") == b"\x00\xff"
    assert store.get("empty") == b""
    store.set("a", b"new")
    assert store.get("a") == b"new"
    assert store.num_keys() == 3


def test_a_megabyte_comes_back(store: Store) -> None:
    value = bytes(range(256)) * 4096
    store.multi_set(["a", "b"], [value, value[::-1]])
    assert store.multi_get(["b", "a"]) == [value[::-1], value]


def test_counters(store: Store) -> None:
    assert store.add("counter", 5) == 5
    assert store.add("counter", -8) == -3
    assert store.add("counter", 0) == -3
    assert store.get("counter") == b"-3"
    store.set("counter", "40")
    assert store.add("counter", 2) == 42
    store.set("a", "not a number")
    with pytest.raises(StoreError, match=r"add: the value of key '.*a' is not a 64-bit decimal number"):
        store.add("a", 1)
    assert store.get("a") == b"not a number"


def test_append(store: Store) -> None:
    store.append("a", "one")
    store.append("a", b" two")
    assert store.get("a") == b"one two"


def test_compare_set(store: Store) -> None:
    assert store.compare_set("a", "expected", "desired") == b"expected"
    assert not store.check(["a"])
    assert store.compare_set("a", "", "first") == b"first"
    assert store.compare_set("a", "other", "second") == b"first"
    assert store.compare_set("a", b"first", b"second") == b"second"
    assert store.get("a") == b"second"


def test_check_and_delete(store: Store) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.check(["a", "b"])
    assert store.check([])
    assert not store.check(["a", "c"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])
    assert store.num_keys() == 1


def test_waiting_for_what_is_there_returns_at_once(store: Store) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    store.wait(["a", "b"])
    store.wait([])
    assert store.multi_get([]) == []


def test_get_wait_and_multi_get_wait_for_keys_to_come(store: Store, threads: ThreadPoolExecutor) -> None:
    asked = [
        threads.submit(store.get, "a"),
        threads.submit(store.wait, ["a", "b"]),
        threads.submit(store.multi_get, ["c", "a"]),
    ]
    assert not wait(asked, timeout=SOON_S).done
    store.set("a", "1")
    assert asked[0].result() == b"1"
    store.append("b", "2")
    assert asked[1].result() is None
    assert store.add("c", 3) == 3
    assert asked[2].result() == [b"3", b"1"]


def test_every_waiter_of_a_key_is_woken(store: Store, threads: ThreadPoolExecutor) -> None:
    asked = [threads.submit(store.get, "a") for _ in range(16)]
    assert not wait(asked, timeout=SOON_S).done
    store.set("a", "go")
    assert [future.result() for future in asked] == [b"go"] * 16


def test_timeouts_name_the_missing_keys(store: Store) -> None:
    store.set("b", "here")
    started_s = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=r"wait: 2 of 3 keys did not come within 0.05 s: '.*a', '.*c'"):
        store.wait(["a", "b", "c"], SOON_S)
    store.set_timeout(timedelta(seconds=SOON_S))
    assert store.timeout_s == SOON_S
    with pytest.raises(StoreTimeoutError, match=r"get: key '.*a' did not come within 0.05 s"):
        store.get("a")
    with pytest.raises(TimeoutError, match="multi_get: 1 of 2 keys"):
        store.multi_get(["a", "b"])
    assert 3 * SOON_S <= time.monotonic() - started_s < 25
    assert store.get("b") == b"here"


def test_a_barrier_opens_for_its_last_member_and_can_be_used_again(store: Store, threads: ThreadPoolExecutor) -> None:
    for _ in range(3):
        early = [threads.submit(store.barrier, "go", 4) for _ in range(3)]
        assert not wait(early, timeout=SOON_S).done
        store.barrier("go", 4)
        assert [future.result() for future in early] == [None] * 3


def test_a_barrier_that_times_out_says_how_many_came_and_starts_afresh(
    store: Store, threads: ThreadPoolExecutor
) -> None:
    with pytest.raises(StoreTimeoutError, match=r"barrier: 1 of 3 members came to barrier '.*go' within 0.05 s"):
        store.barrier("go", 3, SOON_S)
    store.barrier("go", 1)
    both = [threads.submit(store.barrier, "go", 2) for _ in range(2)]
    assert [future.result(LONG_S) for future in both] == [None, None]


def test_a_barrier_needs_one_size(store: Store, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(store.barrier, "go", 2)
    assert not wait([first], timeout=SOON_S).done
    with pytest.raises(StoreError, match="waits for 2 members; this caller says 3"):
        store.barrier("go", 3)
    with pytest.raises(StoreError, match="at least one member"):
        store.barrier("other", 0)
    store.barrier("go", 2)
    assert first.result() is None


def test_counting_from_many_threads_and_clones_loses_nothing(store: Store, threads: ThreadPoolExecutor) -> None:
    def count(own: Store) -> list[int]:
        return [own.add("counter", 1) for _ in range(25)]

    clones = [store.clone() for _ in range(4)]
    seen = [total for totals in threads.map(count, [store] * 4 + clones) for total in totals]
    assert sorted(seen) == list(range(1, 201))
    for clone in clones:
        clone.close()


def test_a_clone_shares_keys_and_is_closed_on_its_own(store: Store) -> None:
    clone = store.clone()
    clone.set("a", "from the clone")
    assert store.get("a") == b"from the clone"
    assert clone.timeout_s == store.timeout_s
    clone.close()
    clone.close()
    with pytest.raises(StoreConnectionError, match="closed"):
        clone.get("a")
    assert store.get("a") == b"from the clone"


def test_closing_fails_what_waits(store: Store, threads: ThreadPoolExecutor) -> None:
    clone = store.clone()
    waiting = [threads.submit(clone.get, "a"), threads.submit(clone.barrier, "go", 2)]
    assert not wait(waiting, timeout=SOON_S).done
    clone.close()
    for future in waiting:
        with pytest.raises(StoreConnectionError, match="closed"):
            future.result(60)


def test_limits_are_named_and_the_store_lives_on(store: Store) -> None:
    with pytest.raises(StoreLimitError, match=r"limit is 8192 \(DISTTRAIN_STORE_MAX_KEY_BYTES"):
        store.set("k" * 8193, "")
    with pytest.raises(ValueError, match="DISTTRAIN_STORE_MAX_KEY_BYTES"):
        store.check(["a", "k" * 8193])
    store.set("a", "still here")
    assert store.get("a") == b"still here"


def test_wrong_arguments(store: Store) -> None:
    with pytest.raises(StoreError, match="keys is the str 'ab'"):
        store.wait("ab")
    with pytest.raises(StoreError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])
    with pytest.raises(StoreError, match="the value is a int"):
        store.set("a", 5)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="a key is a str"):
        store.wait([5])  # type: ignore[list-item]
    with pytest.raises(SettingError, match="it must be positive"):
        store.wait(["a"], -1)
    with pytest.raises(StoreTimeoutError, match="did not come"):
        store.wait(["a"], 0)
    assert store.num_keys() == 0


def test_a_long_wait_holds_nobody(store: Store, threads: ThreadPoolExecutor) -> None:
    waiting = [threads.submit(store.wait, [f"k{number}"]) for number in range(4)]
    for number in range(200):
        store.set("a", str(number))
        assert store.get("a") == str(number).encode()
    assert not any(future.done() for future in waiting)
    store.multi_set([f"k{number}" for number in range(4)], [""] * 4)
    assert [future.result() for future in waiting] == [None] * 4


def test_prefixes_keep_users_apart(store: Store) -> None:
    left, right = PrefixStore("left", store), PrefixStore("left", PrefixStore("right", store))
    left.set("a", "1")
    right.set("a", "2")
    assert (left.get("a"), right.get("a")) == (b"1", b"2")
    assert store.multi_get(["left/a", "right/left/a"]) == [b"1", b"2"]
    assert left.num_keys() == 2
    left.close()
    assert store.check(["left/a"])
    barrier = threading.Thread(target=left.barrier, args=("go", 2))
    barrier.start()
    with pytest.raises(StoreTimeoutError):
        right.barrier("go", 2, SOON_S)
    left.barrier("go", 2)
    barrier.join()


def test_keys_are_listed_by_prefix(store: Store) -> None:
    store.multi_set(["a/2", "a/1", "b"], ["", "", ""])
    store.queue_push("a/queue", "not a key")
    assert store.list_keys("a/") == ["a/1", "a/2"]
    assert store.list_keys() == ["a/1", "a/2", "b"]
    assert store.list_keys("c") == []
    assert PrefixStore("a", store).list_keys() == ["1", "2"]


def test_a_queue_gives_each_value_to_one_taker_in_order(store: Store) -> None:
    assert store.queue_len("jobs") == 0
    for value in ("1", b"2", "3"):
        store.queue_push("jobs", value)
    assert store.queue_len("jobs") == 3
    assert [store.queue_pop("jobs") for _ in range(3)] == [b"1", b"2", b"3"]
    with pytest.raises(StoreQueueEmptyError, match=r"queue_pop: queue '.*jobs' is empty"):
        store.queue_pop("jobs", block=False)
    assert store.num_keys() == 0


def test_popping_waits_for_a_value(store: Store, threads: ThreadPoolExecutor) -> None:
    with pytest.raises(StoreTimeoutError, match=r"queue_pop: queue '.*jobs' stayed empty for 0.05 s"):
        store.queue_pop("jobs", timeout=SOON_S)
    asked = [threads.submit(store.queue_pop, "jobs") for _ in range(3)]
    assert not wait(asked, timeout=SOON_S).done
    for number in range(3):
        store.queue_push("jobs", str(number))
    assert sorted(future.result() for future in asked) == [b"0", b"1", b"2"]
    assert store.queue_len("jobs") == 0


def test_pushing_waits_while_a_queue_is_full(store: Store, threads: ThreadPoolExecutor) -> None:
    store.queue_push("jobs", "1", 1)
    with pytest.raises(StoreTimeoutError, match=r"queue_push: queue '.*jobs' stayed full for 0.05 s"):
        store.queue_push("jobs", "never", 1, SOON_S)
    waiting = threads.submit(store.queue_push, "jobs", "2", 1)
    assert not wait([waiting], timeout=SOON_S).done
    assert store.queue_pop("jobs") == b"1"
    waiting.result()
    assert store.queue_pop("jobs") == b"2"
    with pytest.raises(StoreError, match="capacity is 0"):
        store.queue_push("jobs", "", 0)


def test_watching_sees_what_differs_from_what_was_seen(store: Store, threads: ThreadPoolExecutor) -> None:
    with pytest.raises(StoreTimeoutError, match=r"watch: the value of key '.*a' did not change within 0.05 s"):
        store.watch("a", None, SOON_S)
    waiting = threads.submit(store.watch, "a", None)
    assert not wait([waiting], timeout=SOON_S).done
    store.set("a", "1")
    assert waiting.result() == b"1"
    assert store.watch("a", None) == b"1"
    waiting = threads.submit(store.watch, "a", "1")
    store.set("a", "1")
    assert not wait([waiting], timeout=SOON_S).done
    store.set("a", "2")
    assert waiting.result() == b"2"
    waiting = threads.submit(store.watch, "a", "2")
    assert not wait([waiting], timeout=SOON_S).done
    store.delete_key("a")
    assert waiting.result() is None


def test_a_queue_that_holds_a_value_is_a_key_that_exists(store: Store, threads: ThreadPoolExecutor) -> None:
    assert store.has_extended_api()
    assert isinstance(store, Store)
    assert not store.check(["jobs"])
    waiting = threads.submit(store.wait, ["key", "jobs"])
    reading = threads.submit(store.get, "jobs")
    store.set("key", "1")
    store.queue_push("jobs", "first")
    waiting.result(LONG_S)
    assert store.check(["jobs", "key"])
    store.wait(["jobs"], SOON_S)
    assert store.queue_pop("jobs") == b"first"
    assert not store.check(["jobs"])
    with pytest.raises(StoreTimeoutError, match=r"key '.*jobs' did not come"):
        store.wait(["jobs"], SOON_S)
    # It has no value as a key has.
    assert not reading.done()
    store.set("jobs", "2")
    assert reading.result(LONG_S) == b"2"
    assert store.num_keys() == 2
