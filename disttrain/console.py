"""Prints the output of commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence


def write(text: str) -> None:
    """Print; a reader such as `head` that has seen enough is no error, nor is a terminal that lacks a letter."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    """Columns in `words` to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def size_text(num_bytes: int) -> str:
    """Such as `1.5 GiB`."""
    size, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{num_bytes} bytes" if units[0] == "bytes" else f"{size:.4g} {units[0]}"


def short(number: float) -> str:
    """Three digits: 950, 11.2k, 539k, 1.16M."""
    for unit in ("", "k", "M", "G"):
        if not abs(number) >= 999.5:
            size = abs(number)
            return f"{number:.{0 if size >= 99.95 or not unit else 1 if size >= 9.995 else 2}f}{unit}"
        number /= 1000
    return f"{number:.0f}T" if abs(number) < 1e6 else f"{number * 1e12:.3g}"


def clock(duration_s: float) -> str:
    """m:ss, or h:mm:ss."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
