"""What programs written for torch's stores do with ours: arguments, words, `rendezvous`."""

from __future__ import annotations

import gc
import socket
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

import disttrain
from disttrain.errors import RendezvousError, StoreAddressError, StoreConnectionError
from disttrain.store.connection.handover import store_from_plain, store_to_plain


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_server_takes_over_a_socket_that_is_bound() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = disttrain.TCPStore(host, port, 1, True, master_listen_fd=listener.detach(), use_libuv=False)
    other = disttrain.TCPStore(host, port, -1)
    store.set("key", "value")
    assert other.get("key") == b"value"
    assert (store.port, store.libuvBackend, other.libuvBackend) == (port, False, True)
    assert f"127.0.0.1:{port}" in repr(store)
    # Keys of the store's own are not counted.
    assert store.num_keys() == 1
    other.close()
    store.close()


def test_a_socket_that_all_reach_needs_a_token() -> None:
    listener = socket.socket()
    listener.bind(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    with pytest.raises(disttrain.DistStoreError, match="without a token may listen on loopback only"):
        disttrain.TCPStore("127.0.0.1", port, 1, True, master_listen_fd=listener.detach())


def test_words_that_programs_look_for() -> None:
    with pytest.raises(ValueError, match="TCPStore world size cannot be 0"):
        disttrain.TCPStore("localhost", 0, world_size=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = rf"^TCPStore: The server socket has failed to listen on any local .*{port}: Address already in use"
        with pytest.raises(disttrain.DistNetworkError, match=words):
            disttrain.TCPStore("127.0.0.1", port, 1, True)
        with pytest.raises(StoreAddressError):
            disttrain.TCPStore("127.0.0.1", port, 1, True, use_libuv=False)
    words = r"Timed out after 0.3 seconds waiting for clients. 1/2 clients joined."
    with pytest.raises(disttrain.DistStoreError, match=words):
        disttrain.TCPStore("127.0.0.1", 0, 2, True, timeout=0.3)


def test_rendezvous_at_an_address() -> None:
    url = f"tcp://127.0.0.1:{_free_port()}?world_size=1&rank=0&use_libuv=1"
    found = disttrain.rendezvous(url, timeout=timedelta(seconds=10))
    store, rank, world_size = next(found)
    assert (rank, world_size, store.timeout_s) == (0, 1, 10)
    with pytest.raises(RendezvousError, match="no second store"):
        next(found)
    store.set("key", "value")
    # As torch's: who comes again finds the store that is there.
    again, _, _ = next(disttrain.rendezvous(url))
    assert again.get("key") == b"value"
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(disttrain.DistStoreError, match="wait timeout after 100ms, keys: /nonexistent key"):
        store.get("nonexistent key")
    again.close()
    store.close()


def test_rendezvous_in_a_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?world_size=2"
    (first, *_), (second, rank, size) = (next(disttrain.rendezvous(f"{url}&rank={rank}")) for rank in range(2))
    assert (rank, size) == (1, 2)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_rendezvous_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("DISTTRAIN_STORE", raising=False)
    store, rank, world_size = next(disttrain.rendezvous("env://"))
    assert (rank, world_size) == (0, 1)
    assert isinstance(store, disttrain.TCPStore)
    # A launcher's store has others' keys, too.
    monkeypatch.setenv("DISTTRAIN_STORE", f"127.0.0.1:{store.port}")
    launchers, _, _ = next(disttrain.rendezvous("env://"))
    launchers.set("key", "value")
    assert store.get("rendezvous/key") == b"value"
    assert isinstance(launchers, disttrain.PrefixStore)
    launchers.underlying_store.close()
    store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://?rank=0&world_size=1", "path missing"),
        ("file:///tmp/foo?world_size=1", "rank parameter missing"),
        ("file:///tmp/foo?rank=0", "size parameter missing"),
        ("tcp://127.0.0.1?rank=0&world_size=1", "port number missing"),
        ("tcp://127.0.0.1:23456?world_size=1", "rank parameter missing"),
        ("tcp://127.0.0.1:23456?rank=0", "size parameter missing"),
        ("tcp://127.0.0.1:23456?rank=x&world_size=1", "rank is 'x', which is no number"),
        ("invalid://", "No rendezvous handler"),
    ],
)
def test_an_address_that_says_too_little(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        disttrain.rendezvous(url)


def test_an_address_that_says_it_twice() -> None:
    with pytest.raises(ValueError, match="has node-specific arguments"):
        disttrain.rendezvous("file:///tmp/foo?rank=1&world_size=2", 1, 2)


def test_a_name_that_does_not_resolve() -> None:
    words = r"client socket has timed out after 200ms.*dnsnotexist\.invalid:23456"
    with pytest.raises(disttrain.DistNetworkError, match=words):
        next(disttrain.rendezvous("tcp://dnsnotexist.invalid:23456?world_size=2&rank=1", timeout=0.2))


def test_a_file_goes_with_the_last_who_is_let_go_of(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first = disttrain.FileStore(path, 1)
    second = disttrain.FileStore(path, 1)
    del first
    gc.collect()
    assert path.exists()
    second.set("key", "value")
    del second
    gc.collect()
    assert not path.exists()


def test_the_stores_of_groups() -> None:
    store = disttrain.HashStore()
    disttrain.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for found in (disttrain._get_default_store(), disttrain._get_process_group_store(disttrain.group.WORLD)):
            assert isinstance(found, disttrain.PrefixStore)
            assert found._underlying_non_prefix_store is store
    finally:
        disttrain.destroy_process_group()


def test_a_store_that_has_gone_is_not_waited_for() -> None:
    store = disttrain.TCPStore("127.0.0.1", 0, is_master=True, timeout=60)
    plain = store_to_plain(disttrain.PrefixStore("a", store))
    with closing(store_from_plain(plain)) as other:
        assert not other.check(["key"])
    store.close()
    began_s = time.monotonic()
    with pytest.raises(StoreConnectionError, match="nobody listens there any more"):
        store_from_plain(plain)
    assert time.monotonic() - began_s < 9
