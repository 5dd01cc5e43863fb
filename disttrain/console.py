"""What commands print."""

from __future__ import annotations

import os
import sys


def write(text: str) -> None:
    """Print; a reader such as `head` that has seen enough is no error, nor is a terminal that lacks a letter."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
