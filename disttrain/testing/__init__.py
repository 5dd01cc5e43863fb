"""Tools for testing distributed code: ranks as threads, and a pool of rank processes. For users of disttrain as well."""

from __future__ import annotations

from disttrain.testing.pool import RankError, RankPool
from disttrain.testing.threads import run_threads

__all__ = ["RankError", "RankPool", "run_threads"]
