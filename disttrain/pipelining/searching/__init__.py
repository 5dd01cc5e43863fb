"""Looks for a schedule that suits measured times better than those with names."""

from __future__ import annotations

from disttrain.pipelining.searching.search import Found, search

__all__ = ["Found", "search"]
