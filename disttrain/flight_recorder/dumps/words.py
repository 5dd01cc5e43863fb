"""Names and reasons of dumps, which a job needs from its start; the contents of dumps load slowly. Torch-free."""

from __future__ import annotations

from typing import Final

DUMP_VERSION: Final = 5
"""Of the format; it rises when readers must change."""

EXIT: Final = "exit"
EXCEPTION: Final = "exception"
UNCAUGHT_EXCEPTION: Final = "uncaught exception"
END_REASONS: Final = (EXIT, EXCEPTION, UNCAUGHT_EXCEPTION)
"""Why a dump is made when a process, or its world, ends."""


def rank_name(rank: int, job: str) -> str:
    """The beginning of the file names of a rank."""
    return f"rank-{rank:05d}.{job}"
