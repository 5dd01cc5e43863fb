"""A file that appears whole or not at all, for its owner's eyes only: as private as the dumps that it tells of."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from disttrain.errors import FlightDumpError


def replace_file(file: Path, data: bytes) -> None:
    """Let `file` hold `data`, in one step: a reader sees all of it, or what was there before. Raises OSError.

    Several threads may do so at once: the last one's is kept.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_native_id()}")
    # A file of this name was left by a process that was killed. Whatever it is, even a link, nothing is written through
    # it.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def private_file(file: Path) -> Iterator[TextIO]:
    """A stream for what `file` is to hold. Raises FlightDumpError when it cannot be written."""
    try:
        if file.exists() and not file.is_file():  # such as /dev/stdout
            with file.open("w", encoding="utf-8") as stream:
                yield stream
            return
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                yield stream
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        problem = f"{str(file)!r} cannot be written: {getattr(error, 'strerror', None) or error}."
        raise FlightDumpError("disttrain-flight", problem, "Name a file in a folder that you may write to.") from None
