"""A training process's end of its writer: starts it, hands it memory and saves, hears of them and of its death."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from disttrain._python.signals import blocked_for_a_helper
from disttrain.checkpoint.async_saving.job import END, SHARED_MEMORY
from disttrain.checkpoint.async_saving.shared_memory import SharedMemory
from disttrain.checkpoint.async_saving.wire import Wire
from disttrain.errors import CheckpointError
from disttrain.settings import environment

Hear = Callable[[list[Any]], None]


class WriterLink:
    """One writer. `hear` is called with what it says, `died` with a sentence when it ends though it was not told to.

    Both are called by a thread of the link's.
    """

    def __init__(self, config: Sequence[Any], hear: Hear, died: Callable[[str], None]) -> None:
        local_end, writer_end = socket.socketpair()
        try:
            with blocked_for_a_helper():
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "disttrain.checkpoint.async_saving.writer_process",
                        str(writer_end.fileno()),
                    ],
                    pass_fds=[writer_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    start_new_session=True,
                )
        except OSError as error:
            local_end.close()
            raise CheckpointError("async_save", f"cannot start {sys.executable}: {error}.") from error
        finally:
            writer_end.close()
        self._wire = Wire(local_end)
        self._is_ending = False
        self._sent: dict[int, weakref.ref[SharedMemory]] = {}
        # A forked child must not keep the writer waiting for us.
        os.register_at_fork(after_in_child=_Closing(local_end))
        self._listener = threading.Thread(target=self._listen, args=(hear, died), daemon=True)
        self._listener.start()
        self.say(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: Sequence[Any]) -> None:
        """Sends a message. One to a writer that has died is lost: `died` is called, or has been."""
        try:
            self._wire.send(message)
        except OSError:  # the listener notices as well, and knows why
            pass

    def show(self, key: int, shared_memory: SharedMemory) -> None:
        """Share shared memory, once."""
        sent = self._sent.get(key)
        if sent is not None and sent() is shared_memory:
            return
        self._sent[key] = weakref.ref(shared_memory)
        try:
            self._wire.send([SHARED_MEMORY, key, shared_memory.num_bytes], [shared_memory.descriptor])
        except OSError:  # as in say
            pass

    def end(self) -> None:
        """Let the writer finish what it has, and end."""
        self._is_ending = True
        self.say([END])
        self._wire.end()

    def join(self) -> None:
        """Return once the writer has ended and all that it said has been heard."""
        self._listener.join()

    def _listen(self, hear: Hear, died: Callable[[str], None]) -> None:
        while (received := self._wire.receive()) is not None:
            hear(received[0])
        code = self._process.wait()
        if not self._is_ending or code:
            died(f"the writer process {self._process.pid} {_how(code)}")
        self._wire.close()


class _Closing:
    """Close a socket, if it is still there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = weakref.ref(connection)

    def __call__(self) -> None:
        connection = self._connection()
        if connection is not None:
            connection.close()


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}; it said why on stderr"
