"""Tools for testing distributed code, for users as well: ranks as threads, and a pool of rank processes."""

from __future__ import annotations

from disttrain.testing.pool import RankError, RankPool
from disttrain.testing.threads import run_threads

__all__ = ["RankError", "RankPool", "run_threads"]
