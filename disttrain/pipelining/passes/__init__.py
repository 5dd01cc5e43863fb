"""Each pass takes a schedule and returns one with more in it, or the same with less to do."""

from __future__ import annotations

from disttrain.pipelining.passes.early_receives import place_receives_early
from disttrain.pipelining.passes.insert_messages import insert_messages
from disttrain.pipelining.passes.lower import lower
from disttrain.pipelining.passes.merge_backward import merge_backward, merge_where_free, split_backward
from disttrain.pipelining.passes.reduce_gradients import reduce_gradients
from disttrain.pipelining.passes.unshard_stages import unshard_stages

__all__ = [
    "insert_messages",
    "lower",
    "merge_backward",
    "merge_where_free",
    "place_receives_early",
    "reduce_gradients",
    "split_backward",
    "unshard_stages",
]
