"""The version of disttrain; below everything that shows it."""

from __future__ import annotations

__version__ = "0.1.0"
