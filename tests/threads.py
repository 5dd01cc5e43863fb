"""Threads that meet each other at every place."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def threads_take_turns_often() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)
