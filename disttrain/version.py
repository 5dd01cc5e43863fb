"""Which disttrain this is; below everything that says so."""

from __future__ import annotations

__version__ = "0.1.0"
