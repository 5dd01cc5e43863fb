"""A fork server: a Python that has loaded what many processes of tests need, and forks one for each request.

    python -m tests.forkserver.server DESCRIPTOR KIND TESTS...

It has one thread and has computed nothing, so a fork of it is as good as a fresh interpreter. It listens on the socket
that is its standard input, and ends, with all its forks, when the socket `DESCRIPTOR` is closed at its other end.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.forkserver import scripts
from tests.forkserver.loads import LOADS
from tests.forkserver.process import REQUEST_BYTES

GARBAGE_THRESHOLD = 10_000
"""Objects made between two looks for garbage. At Python's 700 these are 5 to 11 % of what pytest's processes do."""

_NUM_STREAMS = 3


@contextmanager
def listening(kind: str, *tests: str) -> Iterator[str]:
    """The address of a new fork server, which ends with this. It loads when it is asked for the first time.

    Args: kind  what it loads: a name in `loads.LOADS`;  tests  where they are, if it loads these.
    """
    address = f"disttrain-tests-{secrets.token_hex(8)}"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{address}")
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver.server", str(theirs.fileno()), kind, *tests],
                stdin=listener,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    scripts.ROOM: " " * scripts.ROOM_BYTES,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
                },
            )
        # It alone listens now: if it ends, those that ask hear of it.
        yield address
        ours.shutdown(socket.SHUT_RDWR)  # a fork of this process may live on with its end of it
    process.wait()


def serve(owner: socket.socket, listener: socket.socket) -> None:
    """Fork what is asked for at `listener` until `owner` is closed; in a fork, run it."""
    scripts.run(_Server(owner, listener).serve())


class _Server:
    def __init__(self, owner: socket.socket, listener: socket.socket) -> None:
        self._owner, self._listener = owner, listener
        self._clients: list[socket.socket] = []
        self._forks: dict[int, dict[str, str]] = {}
        """Their variables by pid, in the order in which they were forked."""

    def serve(self) -> dict[str, Any]:
        """Returns in forks alone, each with its request."""
        while True:
            ready = select.select([self._owner, self._listener, *self._clients], [], [])[0]
            for source in ready:
                if source is self._owner:
                    self._end()
                elif source is self._listener:
                    self._clients.append(source.accept()[0])
                elif (request := self._answer(source)) is not None:
                    return request

    def _answer(self, client: socket.socket) -> dict[str, Any] | None:
        try:
            data, streams, _, _ = socket.recv_fds(client, REQUEST_BYTES, _NUM_STREAMS)
        except ConnectionResetError:  # it was killed before it had its answer
            data, streams = b"", []
        if not data:
            self._clients.remove(client)
            client.close()
            return None
        request: dict[str, Any] = json.loads(data)
        if "wait" in request:
            answer = os.waitpid(request["wait"], 0)[1]
            del self._forks[request["wait"]]
        elif "living" in request:
            answer = sum(map(_lives, self._forked_with(request["living"])))
        elif "find" in request:
            answer = self._forked_with(request["find"])[-1]
        else:
            answer = os.fork()
            if answer == 0:
                for connection in (self._owner, self._listener, *self._clients):
                    connection.close()
                return {**request, "streams": streams}
            self._forks[answer] = request["environ"]
        for stream in streams:
            os.close(stream)
        with suppress(BrokenPipeError):
            client.sendall(str(answer).encode())
        return None

    def _forked_with(self, variables: Mapping[str, str]) -> list[int]:
        return [pid for pid, environ in self._forks.items() if variables.items() <= environ.items()]

    def _end(self) -> None:
        for pid in self._forks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        sys.exit()


def _lives(pid: int) -> bool:
    """It may be asked about later, too: it is left to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None


def _load(kind: str, *tests: str) -> None:
    gc.disable()
    LOADS[kind](*tests)
    assert threading.active_count() == 1
    scripts.keep_what_is_loaded()
    gc.collect()
    gc.freeze()  # What is loaded stays: a fork's collections would copy all of it.
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.enable()


def _leave_interrupts_to_owner() -> None:
    """From a terminal all processes get Ctrl-C; this one ends with its owner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    _leave_interrupts_to_owner()
    owner, listener = socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=os.dup(0))
    if owner in select.select([owner, listener], [], [])[0]:
        return
    _load(*sys.argv[2:])
    _leave_interrupts_to_owner()  # tests/conftest.py has a handler again
    serve(owner, listener)


if __name__ == "__main__":
    main()
