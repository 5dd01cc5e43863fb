"""From the order of computations to what an executor runs."""

from __future__ import annotations

from dataclasses import replace

from disttrain._python.garbage import uncollected
from disttrain.pipelining.passes.early_receives import place_receives_early
from disttrain.pipelining.passes.insert_messages import insert_messages
from disttrain.pipelining.passes.merge_backward import merge_where_free
from disttrain.pipelining.passes.reduce_gradients import reduce_gradients
from disttrain.pipelining.passes.unshard_stages import unshard_stages
from disttrain.pipelining.schedule.costs import Costs
from disttrain.pipelining.schedule.schedule import Schedule, Wiring


@uncollected()
def lower(
    schedule: Schedule,
    *,
    wiring: Wiring | None = None,
    costs: Costs | None = None,
    max_unsharded: int | None = None,
    num_ahead: int = 1,
) -> Schedule:
    """All passes in their order: merge I with W where that is free, unshard, reduce gradients, insert messages, receive
    early.

    Args: schedule  computations only;  wiring  the model's skip edges and ties;  the others as the passes have them.
    Raises: ScheduleError as they do.
    """
    wired = replace(schedule, wiring=wiring or schedule.wiring)
    sharded = reduce_gradients(unshard_stages(merge_where_free(wired), max_unsharded))
    return place_receives_early(insert_messages(sharded, costs), num_ahead)
