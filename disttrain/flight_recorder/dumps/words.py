"""What a job must know of dumps from its start, apart from what they hold, which loads slowly. Torch-free."""

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
    """How the files of a rank begin."""
    return f"rank-{rank:05d}.{job}"
