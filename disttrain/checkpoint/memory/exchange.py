"""Files between nodes: a peer that knows the secret may put a file into a node's memory, and read one from there.

Both sides first prove that they know the secret, by challenge and answer as at the store (`store/protocol/auth.py`).
Only processes that may read the job's store find address and secret there. The bytes are not encrypted, like those of
collectives. A reader may send several requests on one connection.

    server: nonce                             client: nonce, proof          server: proof
    client: [PUT, save, file, bytes], data                                  server: [""] or [problem]
    client: [READ, save, file, offset, bytes]                               server: ["", file's bytes, bytes], data

Torch-free.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import msgpack

from disttrain.checkpoint.memory.peer_memory import NodeMemory
from disttrain.settings import CHECKPOINT_TIMEOUT_S, MASTER_ADDR
from disttrain.store import Store, new_token
from disttrain.store.connection.addresses import is_unix, outward_address, own_address
from disttrain.store.protocol.auth import NONCE_BYTES, client_proof, new_nonce, same, server_proof

PUT, READ = "put", "read"

_STALL_S = 30.0
"""The longest wait for the next bytes of a peer."""

_PROOF_S = 10.0
"""The time that a new connection has to prove that it belongs to the job."""

_AGAIN_S = 0.1
_MAX_UNPROVED = 1024
"""The most connections that have not proved so yet."""

_PROOF_BYTES = 32
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 64 << 10
_PIECE_BYTES = 4 << 20


class Address(NamedTuple):
    """Address of a node's server, and the secret to prove to it that one belongs to the job."""

    host: str
    port: int
    secret: str


class FileServer:
    """Serves one node's memory, by a thread for each connection, until it is closed.

    Args: store  that the job meets at: listens where those that reach it can reach us.
    Raises OSError when it cannot listen.
    """

    def __init__(self, memory: NodeMemory, store: Store | None) -> None:
        self._memory = memory
        host = _host(store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=256)
        self.address = Address(host, self._listener.getsockname()[1], new_token())
        self._unproved = threading.Semaphore(_MAX_UNPROVED)
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="disttrain-memory", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those there are end with their peers."""
        self._closing.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError:
            pass
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or out of descriptors, which passes
                if self._closing.wait(_AGAIN_S):
                    return
                continue
            if not self._unproved.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # out of threads, which passes as well
                self._unproved.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with closing(connection):
            try:
                if not self._is_proved(connection):
                    return
                while True:
                    # Between requests a reader may do other things, such as waiting for other ranks.
                    connection.settimeout(CHECKPOINT_TIMEOUT_S.read())
                    kind, *request = _receive_frame(connection)
                    connection.settimeout(_STALL_S)
                    if kind == PUT:
                        self._take(connection, *request)
                    else:
                        self._give(connection, *request)
            except (OSError, ValueError, TypeError):  # the peer has gone, or is none of ours
                return

    def _is_proved(self, connection: socket.socket) -> bool:
        try:
            connection.settimeout(_PROOF_S)
            nonce = new_nonce()
            connection.sendall(nonce)
            answer = _receive(connection, NONCE_BYTES + _PROOF_BYTES)
        finally:
            self._unproved.release()
        client_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not same(proof, client_proof(self.address.secret, nonce, client_nonce)):
            return False
        connection.sendall(server_proof(self.address.secret, nonce, client_nonce))
        return True

    def _take(self, connection: socket.socket, save: str, file: str, num_bytes: int) -> None:
        try:
            self._memory.write(save, file, _arriving(connection, num_bytes))
        except OSError as error:
            # The rest of the data would be taken for a request, so the connection ends after this.
            _send_frame(connection, [f"{type(error).__name__}: {error}"])
            raise
        _send_frame(connection, [""])

    def _give(self, connection: socket.socket, save: str, file: str, offset: int, num_bytes: int) -> None:
        try:
            descriptor = os.open(self._memory.path_of(save, file), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            _send_frame(connection, [f"{type(error).__name__}: {error}"])
            return
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            file_bytes = os.fstat(descriptor).st_size
            following = max(0, min(num_bytes, file_bytes - offset))
            _send_frame(connection, ["", file_bytes, following])
            if following:
                connection.sendfile(opened, offset, following)


def put_file(address: Address, save: str, file: str, data: memoryview) -> None:
    """Have a node keep a file. Raises OSError."""
    with _connected(address) as connection:
        _send_frame(connection, [PUT, save, file, len(data)])
        try:
            # Piece by piece: the time that `sendall` may take is for all that it is given.
            for start in range(0, len(data), _PIECE_BYTES):
                connection.sendall(data[start : start + _PIECE_BYTES])
        except OSError:
            # A node without room says so and closes; its message says more than the broken pipe.
            _check(_receive_frame(connection))
            raise
        _check(_receive_frame(connection))


class RemoteFile:
    """A file in another node's memory; satisfies `ReadableFile`. Errors are OSError."""

    def __init__(self, connection: socket.socket, save: str, file: str) -> None:
        self._connection = connection
        self._name = (save, file)
        self._mutex = threading.Lock()
        self.num_bytes = self.read_at(0, memoryview(b""))

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` on; returns how many bytes there were, or the file's size for an empty one."""
        with self._mutex:  # question and answer go together
            try:
                return self._read_at(offset, buffer)
            except BaseException:
                # The rest of this answer may still come, and would be taken for the next one.
                self._connection.close()
                raise

    def _read_at(self, offset: int, buffer: memoryview) -> int:
        _send_frame(self._connection, [READ, *self._name, offset, len(buffer)])
        answer = _receive_frame(self._connection)
        _check(answer)
        _, file_bytes, following = answer
        if not len(buffer):
            return int(file_bytes)
        if following > len(buffer):
            raise OSError(f"{following} bytes came, {len(buffer)} were asked for")
        _receive_into(self._connection, buffer[:following])
        return int(following)


@contextmanager
def remote_file(address: Address, save: str, file: str) -> Iterator[RemoteFile]:
    """Open a file in another node's memory. Raises OSError."""
    with _connected(address) as connection:
        yield RemoteFile(connection, save, file)


@contextmanager
def _connected(address: Address) -> Iterator[socket.socket]:
    """A connection whose both ends have proved themselves."""
    with socket.create_connection((address.host, address.port), _PROOF_S) as connection:
        nonce, server_nonce = new_nonce(), _receive(connection, NONCE_BYTES)
        connection.sendall(nonce + client_proof(address.secret, server_nonce, nonce))
        if not same(_receive(connection, _PROOF_BYTES), server_proof(address.secret, server_nonce, nonce)):
            raise ConnectionError(f"who listens at {address.host}:{address.port} is not of this job")
        connection.settimeout(_STALL_S)
        yield connection


def _host(store: Store | None) -> str:
    """The address at which the others reach this node: that of the interface toward the store's server, or of the
    default route."""
    while (under := getattr(store, "underlying_store", None)) is not None:
        store = under
    if store is None:
        return "127.0.0.1"
    host = getattr(store, "host", None)
    # What is said to be the master's address is the server's, if there is one.
    if host is None:
        return outward_address()
    master = MASTER_ADDR.read() or str(host)
    return outward_address() if is_unix(master) else own_address(master)


def _check(answer: Sequence[Any]) -> None:
    if answer[0]:
        raise OSError(str(answer[0]))


def _send_frame(connection: socket.socket, message: Sequence[Any]) -> None:
    body = msgpack.packb(message)
    connection.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def _receive_frame(connection: socket.socket) -> list[Any]:
    num_bytes = int.from_bytes(_receive(connection, _LENGTH_BYTES), "little")
    if num_bytes > _MAX_FRAME_BYTES:
        raise OSError(f"a frame of {num_bytes} bytes")
    message = msgpack.unpackb(_receive(connection, num_bytes))
    if not isinstance(message, list) or not message:
        raise OSError("a frame without a message")
    return message


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        num_read = connection.recv_into(view[done:])
        if num_read == 0:
            raise ConnectionResetError("the connection ended")
        done += num_read


def _arriving(connection: socket.socket, num_bytes: int) -> Iterator[memoryview]:
    """The next `num_bytes`, piece by piece, each in the same memory."""
    piece = memoryview(bytearray(min(num_bytes, _PIECE_BYTES)))
    for start in range(0, num_bytes, _PIECE_BYTES):
        part = piece[: num_bytes - start]
        _receive_into(connection, part)
        yield part
