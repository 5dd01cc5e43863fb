"""A timeline for the eye: in the terminal, as SVG, as a Chrome trace."""

from __future__ import annotations

from disttrain.pipelining.pictures.svg import draw_svg
from disttrain.pipelining.pictures.text import draw_text
from disttrain.pipelining.pictures.trace import chrome_trace

__all__ = ["chrome_trace", "draw_svg", "draw_text"]
