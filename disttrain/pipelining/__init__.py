"""Pipelines: schedules as data, proven and drawn before they run.

    schedule = make_schedule("ZBV", num_ranks=8, num_microbatches=32)
    verify(lowered := lower(schedule))
    print(draw_text(simulate(lowered)))

All of this works without torch. What runs a pipeline needs it: models cut into stages, batches cut into microbatches,
and backward passes cut into one for inputs and one for weights. Each name is fetched from its module when it is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.pipelining.microbatch import Microbatches as Microbatches
    from disttrain.pipelining.microbatch import TensorChunkSpec as TensorChunkSpec
    from disttrain.pipelining.microbatch import merge_chunks as merge_chunks
    from disttrain.pipelining.microbatch import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
    from disttrain.pipelining.model.backward import Backward as Backward
    from disttrain.pipelining.model.block_stages import split_blocks as split_blocks
    from disttrain.pipelining.model.layers import split_layers as split_layers
    from disttrain.pipelining.model.parts import measure_costs as measure_costs
    from disttrain.pipelining.model.pipe import Pipe as Pipe
    from disttrain.pipelining.model.pipe import SplitPoint as SplitPoint
    from disttrain.pipelining.model.pipe import pipe_split as pipe_split
    from disttrain.pipelining.model.pipe import pipeline as pipeline
    from disttrain.pipelining.model.stages import SplitModel as SplitModel
    from disttrain.pipelining.model.stages import TiedWeight as TiedWeight
    from disttrain.pipelining.named_schedules import PipelineScheduleMulti as PipelineScheduleMulti
    from disttrain.pipelining.named_schedules import PipelineScheduleSingle as PipelineScheduleSingle
    from disttrain.pipelining.named_schedules import Schedule1F1B as Schedule1F1B
    from disttrain.pipelining.named_schedules import ScheduleDualPipeV as ScheduleDualPipeV
    from disttrain.pipelining.named_schedules import ScheduleForwardOnly as ScheduleForwardOnly
    from disttrain.pipelining.named_schedules import ScheduleGPipe as ScheduleGPipe
    from disttrain.pipelining.named_schedules import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
    from disttrain.pipelining.named_schedules import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
    from disttrain.pipelining.named_schedules import ScheduleLoopedBFS as ScheduleLoopedBFS
    from disttrain.pipelining.named_schedules import ScheduleVHalf as ScheduleVHalf
    from disttrain.pipelining.named_schedules import ScheduleVMin as ScheduleVMin
    from disttrain.pipelining.named_schedules import ScheduleZBH1 as ScheduleZBH1
    from disttrain.pipelining.named_schedules import ScheduleZBH2 as ScheduleZBH2
    from disttrain.pipelining.named_schedules import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
    from disttrain.pipelining.named_schedules import get_schedule_class as get_schedule_class
    from disttrain.pipelining.passes.lower import lower as lower
    from disttrain.pipelining.pictures.svg import draw_svg as draw_svg
    from disttrain.pipelining.pictures.text import draw_text as draw_text
    from disttrain.pipelining.pictures.trace import chrome_trace as chrome_trace
    from disttrain.pipelining.runtime.clipping import clip_grad_norm_ as clip_grad_norm_
    from disttrain.pipelining.runtime.schedule_runtime import PipelineSchedule as PipelineSchedule
    from disttrain.pipelining.schedule.action import Action as Action
    from disttrain.pipelining.schedule.action import Op as Op
    from disttrain.pipelining.schedule.action import parse_action as parse_action
    from disttrain.pipelining.schedule.balance import BlockCosts as BlockCosts
    from disttrain.pipelining.schedule.catalogue import make_schedule as make_schedule
    from disttrain.pipelining.schedule.costs import Costs as Costs
    from disttrain.pipelining.schedule.costs import Link as Link
    from disttrain.pipelining.schedule.csv_form import from_csv as from_csv
    from disttrain.pipelining.schedule.csv_form import to_csv as to_csv
    from disttrain.pipelining.schedule.liveness import Peak as Peak
    from disttrain.pipelining.schedule.liveness import peaks as peaks
    from disttrain.pipelining.schedule.placement import Placement as Placement
    from disttrain.pipelining.schedule.schedule import Schedule as Schedule
    from disttrain.pipelining.schedule.schedule import Wiring as Wiring
    from disttrain.pipelining.schedule.simulator import simulate as simulate
    from disttrain.pipelining.schedule.timeline import Timeline as Timeline
    from disttrain.pipelining.schedule.verifier import find_problems as find_problems
    from disttrain.pipelining.schedule.verifier import verify as verify
    from disttrain.pipelining.schedules.forward_only import forward_only as forward_only
    from disttrain.pipelining.searching.search import search as search
    from disttrain.pipelining.stage import PipelineStage as PipelineStage

_OF_TORCH = {
    "_PipelineSchedule": "disttrain.pipelining.named_schedules",
    "_PipelineScheduleRuntime": "disttrain.pipelining.named_schedules",
}
"""torch's private names that trainers import."""

__getattr__, __dir__, __all__ = lazily(__name__, _OF_TORCH)
