"""One node's memory of saves: what stays, what is torn, and who may put something there."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest

from disttrain.checkpoint import Checkpointer, PeerMemory
from disttrain.checkpoint.memory import exchange
from disttrain.checkpoint.memory.exchange import Address, FileServer, RemoteFile, put_file, remote_file
from disttrain.checkpoint.memory.peer_memory import NodeMemory
from disttrain.checkpoint.memory.replica_placement import ReplicaName
from disttrain.errors import CheckpointError
from disttrain.store import FileStore, PrefixStore

A, B, C, D = (
    ReplicaName(step, order, digit * 32).folder
    for step, order, digit in ((1, 1, "f"), (2, 2, "e"), (3, 3, "d"), (2, 4, "c"))
)


@pytest.fixture
def memory(tmp_path: Path) -> NodeMemory:
    return NodeMemory(tmp_path / "memory")


@pytest.fixture
def server(memory: NodeMemory) -> Iterator[FileServer]:
    server = FileServer(memory, None)
    yield server
    server.close()


def put(memory: NodeMemory, save: str, data: bytes = b"abc") -> None:
    memory.write(save, "x", [memoryview(data)])


def test_the_newest_whole_save_stays_until_another_is_whole(memory: NodeMemory) -> None:
    assert memory.make_room() == 0
    put(memory, A)
    memory.keep(A)
    assert memory.make_room() == 1
    put(memory, B)
    assert sorted(os.listdir(memory.root)) == [A, B]
    assert memory.make_room() == 2  # B has never become whole
    put(memory, C)
    memory.keep(C)
    assert sorted(os.listdir(memory.root)) == [A, C]
    memory.make_room()
    put(memory, D)  # an earlier step, saved later
    memory.keep(D)
    memory.make_room()
    assert os.listdir(memory.root) == [D]


def test_what_was_loaded_stays_and_newer_ones_do_not(memory: NodeMemory) -> None:
    for save in (A, B, C):
        put(memory, save)
    memory.keep(C)  # whose copies turned out to be damaged
    loaded = ReplicaName.of(B)
    assert loaded is not None
    memory.go_on_from(loaded)
    assert memory.make_room() == 3
    assert os.listdir(memory.root) == [B]


def test_what_is_kept_twice_is_there_once(memory: NodeMemory) -> None:
    put(memory, A, b"first")
    put(memory, A, b"again")
    assert (memory.root / A / "x").read_bytes() == b"again"
    assert memory.holdings()[0].has == {"x": 5}


def test_a_manifest_that_is_damaged_is_none(memory: NodeMemory) -> None:
    put(memory, A)
    memory.write(A, "manifest.json", [memoryview(b"{}")])
    (holding,) = memory.holdings()
    assert (holding.has, holding.needed) == ({"x": 3}, None)


def test_files_are_for_their_owner_only(memory: NodeMemory) -> None:
    put(memory, A)
    assert (memory.root / A / "x").stat().st_mode & 0o777 == 0o600
    assert (memory.root / A).stat().st_mode & 0o777 == 0o700


def test_a_file_goes_to_another_node_and_back(memory: NodeMemory, server: FileServer) -> None:
    data = os.urandom(9 << 20)
    put_file(server.address, A, "x", memoryview(data))
    assert memory.holdings()[0].has == {"x": len(data)}
    with remote_file(server.address, A, "x") as file:
        assert file.num_bytes == len(data)
        buffer = bytearray(6 << 20)
        assert file.read_at(1000, memoryview(buffer)) == len(buffer)
        assert buffer == data[1000 : 1000 + len(buffer)]
        assert file.read_at(len(data) - 10, memoryview(buffer)) == 10
        assert buffer[:10] == data[-10:]
    put_file(server.address, A, "empty", memoryview(b""))
    with remote_file(server.address, A, "empty") as file:
        assert file.num_bytes == 0


def test_a_server_that_was_out_of_threads_goes_on(
    memory: NodeMemory, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="ended"):
        put_file(server.address, A, "x", memoryview(b"abc"))
    put_file(server.address, A, "x", memoryview(b"abc"))
    assert memory.holdings()[0].has == {"x": 3}


def test_a_reader_may_rest_between_requests(
    memory: NodeMemory, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, A)
    monkeypatch.setattr(exchange, "_STALL_S", 0.5)
    with remote_file(server.address, A, "x") as file:
        time.sleep(1.0)
        buffer = bytearray(3)
        assert file.read_at(0, memoryview(buffer)) == 3
        assert buffer == b"abc"


def test_what_comes_too_late_answers_no_other_request() -> None:
    ours, theirs = socket.socketpair()
    answers = [msgpack.packb(answer) for answer in (["", 8, 0], ["", 8, 8], ["", 8, 8])]
    frames = [len(answer).to_bytes(4, "little") + answer for answer in answers]
    with ours, theirs:
        ours.settimeout(0.05)
        theirs.sendall(frames[0])
        file = RemoteFile(ours, A, "x")
        theirs.sendall(frames[1])
        with pytest.raises(TimeoutError):
            file.read_at(0, memoryview(bytearray(8)))
        with suppress(BrokenPipeError):
            theirs.sendall(frames[2] + b"12345678")
        with pytest.raises(OSError, match="descriptor"):
            file.read_at(0, memoryview(bytearray(8)))


def test_where_the_store_has_no_server_others_reach_us_on_the_way_out(
    memory: NodeMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever MASTER_ADDR says: nobody needs it for a store in a file."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = FileStore(str(tmp_path / "store"))
    monkeypatch.setattr(exchange, "outward_address", lambda: "127.0.0.3")
    server = FileServer(memory, PrefixStore("job", store))
    assert server.address.host == "127.0.0.3"
    server.close()
    store.close()


def test_a_stranger_gets_and_leaves_nothing(memory: NodeMemory, server: FileServer) -> None:
    put(memory, A)
    stranger = Address(server.address.host, server.address.port, "another secret of someone")
    with pytest.raises(ConnectionError), remote_file(stranger, A, "x"):
        pass
    with pytest.raises(OSError, match=r"connection|reset|pipe"):
        put_file(stranger, A, "y", memoryview(b"abc"))
    assert memory.holdings()[0].has == {"x": 3}


def test_who_listens_must_know_the_secret_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="is not of this job"):
            put_file(Address("127.0.0.1", port, "secret of the job"), A, "x", memoryview(b"abc"))
        thread.join()


@pytest.mark.parametrize("name", ["../outside", "..", "a/b", ""])
def test_names_lead_nowhere_else(memory: NodeMemory, server: FileServer, name: str) -> None:
    with pytest.raises(OSError, match="is not one of a save"):
        put_file(server.address, A, name, memoryview(b"abc"))
    with pytest.raises(OSError, match="is not one of a save"), remote_file(server.address, name, "x"):
        pass


def test_a_file_that_breaks_off_is_not_there(memory: NodeMemory) -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        memory.write(A, "x", broken())
    assert [dict(holding.has) for holding in memory.holdings()] == [{}]
    assert os.listdir(memory.root / A) == []


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"DISTTRAIN_MEMORY_DIR is not set\. Start the job by disttrain-launch"):
        Checkpointer(tmp_path, peer_memory=PeerMemory())
