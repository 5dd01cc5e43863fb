"""The rules of a right schedule, one per file. Each takes a schedule and yields what breaks it.

Later ones may rely on earlier ones' having found nothing.
"""

from __future__ import annotations

from disttrain.pipelining.checks.actions import check_actions
from disttrain.pipelining.checks.counts import check_counts
from disttrain.pipelining.checks.deadlock import check_deadlock
from disttrain.pipelining.checks.messages import check_messages
from disttrain.pipelining.checks.order import check_order
from disttrain.pipelining.checks.problem import Problem
from disttrain.pipelining.checks.sharding import check_sharding

__all__ = [
    "Problem",
    "check_actions",
    "check_counts",
    "check_deadlock",
    "check_messages",
    "check_order",
    "check_sharding",
]
