"""Profiles of training on all ranks: one trace for Perfetto by one clock, and a table of where each rank's time goes.

Each name below is imported from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.profiling.breakdown import Breakdown as Breakdown
    from disttrain.profiling.breakdown import RankTimes as RankTimes
    from disttrain.profiling.profile import profile as profile

__getattr__, __dir__, __all__ = lazily(__name__)
