"""One algorithm per file: counts in, the order of each rank's computations out. No clock, no messages."""

from __future__ import annotations

from disttrain.pipelining.schedules.dualpipev import dualpipev
from disttrain.pipelining.schedules.forward_only import forward_only
from disttrain.pipelining.schedules.gpipe import gpipe
from disttrain.pipelining.schedules.interleaved_1f1b import interleaved_1f1b
from disttrain.pipelining.schedules.interleaved_zero_bubble import interleaved_zero_bubble
from disttrain.pipelining.schedules.looped_bfs import looped_bfs
from disttrain.pipelining.schedules.one_f_one_b import one_f_one_b
from disttrain.pipelining.schedules.v_half import v_half
from disttrain.pipelining.schedules.v_min import v_min
from disttrain.pipelining.schedules.zb_h1 import zb_h1
from disttrain.pipelining.schedules.zb_h2 import zb_h2
from disttrain.pipelining.schedules.zbv import zbv

__all__ = [
    "dualpipev",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zbv",
]
