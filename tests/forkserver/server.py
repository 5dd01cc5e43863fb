"""Scripts in processes of their own without the time that modules take to load: forked from a Python that has them.

That is torch and what goes with it, seconds, or the launcher, or a writer of saves, a fifth of one. That Python has one
thread and has computed nothing. A script begins with its own arguments, variables, folder and streams, as `__main__`,
and ends as any interpreter ends, with all that is done at exit; but what had been loaded before it is left as it is.
Others see its variables in /proc as if it had been started with them. Whoever knows the address may ask for one.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests.forkserver.ending import keep_what_is_loaded, noting_exit_code
from tests.forkserver.loads import LOADS

_REQUEST_BYTES = 1 << 20
_NUM_STREAMS = 3
_ROOM = "DISTTRAIN_TEST_ROOM"
"""A variable that is there for its length: so much room have a script's variables where others look for them."""
_ROOM_BYTES = 20_000

WRITERS = "DISTTRAIN_TEST_WRITERS"
"""A variable of what is forked with torch: where writers of saves are forked from."""

GARBAGE_THRESHOLD = 10_000
"""Objects made between two looks for garbage. At Python's 700 these are 5 to 11 % of what pytest's processes do."""


class Script:
    """One that runs: what of subprocess.Popen is needed here. `streams`: our ends of its pipes, where there are any."""

    def __init__(self, python: WarmPython, pid: int, streams: Sequence[IO[str]] = ()) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = streams or (None, None, None)
        self._python = python
        self._process = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._returncode(0.0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code, or minus the signal that ended it. Raises: subprocess.TimeoutExpired."""
        returncode = self._returncode(timeout_s)
        if returncode is None:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired(f"script {self.pid}", timeout_s)
        return returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, if it still runs."""
        self.kill()
        self.wait(timeout_s=10.0)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _returncode(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._process], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._python.ask({"wait": self.pid}))
            os.close(self._process)
        return self.returncode


class WarmPython:
    """The Python that listens at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(f"\0{address}")
        self._asking = threading.Lock()

    def start(self, *arguments: str | Path, environ: Mapping[str, str]) -> Script:
        """Run `python *arguments` with pipes as streams, and with these variables alone."""
        pipes = [os.pipe() for _ in range(_NUM_STREAMS)]
        theirs = (pipes[0][0], pipes[1][1], pipes[2][1])
        try:
            pid = self.fork([*map(str, arguments)], environ, theirs)
        finally:
            for stream in theirs:
                os.close(stream)
        ours = (os.fdopen(pipes[0][1], "w"), os.fdopen(pipes[1][0]), os.fdopen(pipes[2][0]))
        return Script(self, pid, ours)

    def run(
        self, *arguments: str | Path, environ: Mapping[str, str], limit_s: float = 100.0
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end, without an input."""
        with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
            streams = [nothing.fileno(), out.fileno(), said.fileno()]
            script = Script(self, self.fork([*map(str, arguments)], environ, streams))
            try:
                returncode = script.wait(limit_s)
            finally:
                script.close()
            for stream in (out, said):
                stream.seek(0)
            return subprocess.CompletedProcess(arguments, returncode, out.read(), said.read())

    def fork(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        streams: Sequence[int],
        *,
        folder: str | Path = ".",
        leads_session: bool = False,
    ) -> int:
        """The pid of what `python *arguments` would run: those of a script, or -m or -c; perhaps with -u before."""
        request = {
            "arguments": arguments,
            "environ": dict(environ),
            "folder": os.path.abspath(folder),
            "leads": leads_session,
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        }
        return self.ask(request, streams)

    def settle(self, variables: Mapping[str, str]) -> None:
        """Wait until all scripts that were started with such variables have ended."""
        while self.ask({"living": dict(variables)}):
            time.sleep(0.01)

    def find(self, variables: Mapping[str, str]) -> int:
        """The pid of the script that was started last with such variables."""
        return self.ask({"find": dict(variables)})

    def ask(self, request: Mapping[str, object], streams: Sequence[int] = ()) -> int:
        answer = b""
        with self._asking, suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            answer = self._socket.recv(_REQUEST_BYTES)
        if not answer:
            raise EOFError("The Python that tests are forked from has ended; it says on stderr why it did.")
        return int(answer)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def warm_address(kind: str, *tests: str) -> Iterator[str]:
    """Where one listens for as long as this is open; then it and all its scripts end. It loads for the first of them.

    Args: kind  what it has loaded: a name in `warm_loads.LOADS`;  tests  where they are, if it loads these.
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
                    _ROOM: " " * _ROOM_BYTES,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
                },
            )
        # It alone listens now: if it ends, those that ask hear of it.
        yield address
        ours.shutdown(socket.SHUT_RDWR)  # a fork of this process may live on with its end of it
    process.wait()


class _Server:
    """Forks a script for each request, until its owner has gone."""

    def __init__(self, owner: socket.socket, listener: socket.socket) -> None:
        self._owner, self._listener = owner, listener
        self._asking: list[socket.socket] = []
        self._scripts: dict[int, dict[str, str]] = {}
        """Their variables, by pid; those of the last ones last."""

    def serve(self) -> dict[str, Any]:
        """Returns in each script's process alone, with what was asked."""
        while True:
            ready = select.select([self._owner, self._listener, *self._asking], [], [])[0]
            for one in ready:
                if one is self._owner:
                    self._end()
                elif one is self._listener:
                    self._asking.append(one.accept()[0])
                elif (request := self._answer(one)) is not None:
                    return request

    def _answer(self, asking: socket.socket) -> dict[str, Any] | None:
        try:
            data, streams, _, _ = socket.recv_fds(asking, _REQUEST_BYTES, _NUM_STREAMS)
        except ConnectionResetError:  # it was killed before it had its answer
            data, streams = b"", []
        if not data:
            self._asking.remove(asking)
            asking.close()
            return None
        request: dict[str, Any] = json.loads(data)
        if "wait" in request:
            answer = os.waitpid(request["wait"], 0)[1]
            del self._scripts[request["wait"]]
        elif "living" in request:
            answer = sum(map(_lives, self._started(request["living"])))
        elif "find" in request:
            answer = self._started(request["find"])[-1]
        else:
            answer = os.fork()
            if answer == 0:
                for one in (self._owner, self._listener, *self._asking):
                    one.close()
                return {**request, "streams": streams}
            self._scripts[answer] = request["environ"]
        for stream in streams:
            os.close(stream)
        with suppress(BrokenPipeError):
            asking.sendall(str(answer).encode())
        return None

    def _started(self, variables: Mapping[str, str]) -> list[int]:
        return [pid for pid, environ in self._scripts.items() if variables.items() <= environ.items()]

    def _end(self) -> None:
        for pid in self._scripts:
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
    keep_what_is_loaded()
    gc.collect()
    gc.freeze()  # What is loaded stays: a script's collections, and those at its end, would copy all of it.
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.enable()


def _run(request: dict[str, Any]) -> None:
    """As `python *arguments` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    if request["leads"]:
        os.setsid()
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    _show(request["environ"])
    tempfile.tempdir = None  # TMPDIR is the script's own
    if WRITERS in os.environ and (warm_writers := sys.modules.get("tests.forkserver.writers")):
        warm_writers.have_warm_writers(os.environ[WRITERS])
    arguments = request["arguments"]
    is_unbuffered = arguments[0] == "-u"
    _open_streams(is_unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    with noting_exit_code():
        _run_script(arguments[is_unbuffered:])


def _run_script(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[1], vars(sys.modules["__main__"]))  # noqa: S102 -- of a program that would start a Python for it
    elif arguments[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), arguments[1:]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # it runs as __main__, and runpy warns of a second one
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(arguments[0]).parent), arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _open_streams(is_unbuffered: bool) -> None:
    """As a Python opens its own: whether one is a terminal, or can seek, is looked up once."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = io.TextIOWrapper(
            open(number, "wb", 0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
            errors=errors,
            newline="\n",
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(environ: Mapping[str, str]) -> None:
    """Others find these variables in /proc/PID/environ, which is the memory in which Python was given its own."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[47:49])  # env_start and env_end of proc(5)
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environ.items())
    ctypes.memmove(begin, block[: end - begin].ljust(end - begin, b"\0"), end - begin)


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


def serve(owner: socket.socket, listener: socket.socket) -> None:
    """Fork what is asked for at `listener` until `owner` is closed; in a fork, run it."""
    _run(_Server(owner, listener).serve())


if __name__ == "__main__":
    main()
