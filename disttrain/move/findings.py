"""Findings, what is left to a person: where, what, why, and the page that explains it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why something does not move by itself, and the page (with its section) that says more."""

    why: str
    page: str


@dataclass(frozen=True, order=True)
class Finding:
    """One place of a file. `line` counts from 1; `what` is as the file has it."""

    line: int
    what: str
    why: str
    page: str
