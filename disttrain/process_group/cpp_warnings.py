"""Warnings of torch's C++ code that say nothing to our users."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


def without_warning(pattern: str, call: Callable[[], None]) -> None:
    """Do `call`, silent about the C++ warnings whose text `pattern` (a regular expression) matches; not for hot paths.

    What the transports' methods warn of goes straight to stderr, for they are bound without torch's translation to
    Python's warnings. An autograd function is bound with it, and it holds for all that is called inside.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", pattern)
        _Translated.apply(call)  # type: ignore[no-untyped-call]


class _Translated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], None]) -> None:
        call()
