"""What a warm Python (`warm_python`) forks, with all that subprocess.Popen has: pipes, timeouts, signals, communicate.

Only how it is started, and how one learns that it has ended, is not the standard library's.
"""

from __future__ import annotations

import inspect
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, AnyStr

from tests.forkserver.server import WarmPython

_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
"""Both ends of each, as Popen calls them."""


class WarmProcess(subprocess.Popen[AnyStr]):
    """As `subprocess.Popen([sys.executable, *arguments], **options)`.

    Args: options  Popen's about streams, text, `cwd`, `env` and `start_new_session`.
    """

    def __init__(self, python: WarmPython, arguments: Sequence[str | Path], **options: Any) -> None:
        self._python = python
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def _execute_child(self, *given: Any) -> None:
        """Popen's own, with what it has made of its arguments; of descriptors, -1 is none."""
        names = inspect.signature(super()._execute_child).bind(*given).arguments
        theirs = (names["p2cread"], names["c2pwrite"], names["errwrite"])
        streams = [own if stream == -1 else stream for own, stream in enumerate(theirs)]
        environ = os.environ if names["env"] is None else names["env"]
        leads_session = names["start_new_session"]
        arguments, folder = names["args"][1:], names["cwd"] or "."
        self.pid = self._python.fork(arguments, environ, streams, folder=folder, leads_session=leads_session)
        self._child_created = True
        self._process = os.pidfd_open(self.pid)
        self._close_pipe_fds(*(names[name] for name in _PIPES))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As os.waitpid does: of the parent, which is the warm Python."""
        if not select.select([self._process], [], [], 0.0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = self._python.ask({"wait": self.pid})
        os.close(self._process)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_others: object) -> int | None:
        """`_deadstate`: nobody will ask for this process again."""
        if _deadstate is None and self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode
