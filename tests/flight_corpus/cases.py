"""All cases of the corpus, and where their runs are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.flight_corpus import absent, calls, healthy, messages, parallel, slow
from tests.flight_corpus.case import Case

RUNS: Final = Path(__file__).parent / "runs"
CASES: Final[tuple[Case, ...]] = (
    *absent.CASES,
    *calls.CASES,
    *messages.CASES,
    *parallel.CASES,
    *slow.CASES,
    *healthy.CASES,
)
