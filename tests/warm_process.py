"""What a warm Python (`warm_python`) forks, with all that subprocess.Popen has: pipes, timeouts, signals, communicate.

Only how it is started, and how one learns that it has ended, is not the standard library's.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, AnyStr

from tests.warm_python import WarmPython


class WarmProcess(subprocess.Popen[AnyStr]):
    """As `subprocess.Popen([sys.executable, *arguments], **options)`.

    Args: options  Popen's about streams, text, `cwd`, `env` and `start_new_session`.
    """

    def __init__(self, python: WarmPython, arguments: Sequence[str | Path], **options: Any) -> None:
        self._python = python
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def _execute_child(
        self,
        args: list[str],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: tuple[int, ...],
        cwd: str | Path | None,
        env: dict[str, str] | None,
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: None,
        gids: None,
        uid: None,
        umask: int,
        start_new_session: bool,
        *_others: int,
    ) -> None:
        """Popen's own hook, with what it has made of its arguments; -1: none was given."""
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        environ = os.environ if env is None else env
        self.pid = self._python.fork(args[1:], environ, streams, folder=cwd or ".", leads_session=start_new_session)
        self._child_created = True
        self._process = os.pidfd_open(self.pid)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

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
