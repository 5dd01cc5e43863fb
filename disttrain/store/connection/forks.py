"""Counts the forks that led to this process: what was opened before the last one is the parent's."""

from __future__ import annotations

import os
from typing import Final


class Forks:
    """See `num_forks`, which costs no call into the system."""

    num_forks = 0

    def count(self) -> None:
        self.num_forks += 1


FORKS: Final = Forks()
os.register_at_fork(after_in_child=FORKS.count)
