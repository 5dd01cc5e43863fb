"""The schedules as classes, under torch.distributed.pipelining's names where it has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from disttrain.errors import ScheduleError
from disttrain.pipelining.runtime.refusing import refusing
from disttrain.pipelining.runtime.schedule_runtime import PipelineSchedule
from disttrain.pipelining.schedule.catalogue import find_schedule_kind, make_schedule
from disttrain.pipelining.schedule.csv_form import from_csv
from disttrain.pipelining.stage import PipelineStage, stages_of
from disttrain.process_group.current import resolve_group


class NamedSchedule(PipelineSchedule):
    """A schedule made by its name for as many ranks as the stages' group has. Arguments: as PipelineSchedule."""

    schedule_name: ClassVar[str] = ""

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        with refusing(resolve_group(type(self).__name__, None), type(self).__name__):
            stages = stages_of(type(self).__name__, stages)
        stage = stages[0]
        num_ranks, num_stages = stage.group_size, stage.num_stages
        with refusing(stage.group, type(self).__name__):
            if num_stages % num_ranks:
                raise ScheduleError(
                    type(self).__name__,
                    f"{num_stages} stages cannot be shared equally by {num_ranks} ranks.",
                    f"Cut the model into a multiple of {num_ranks}.",
                    rank=stage.group.world.rank,
                )
            schedule = make_schedule(self.schedule_name, num_ranks, n_microbatches, num_stages // num_ranks)
        super().__init__(
            stages, schedule, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads, **options
        )


class PipelineScheduleSingle(NamedSchedule):
    """The same with one stage per rank, which torch calls `stage`."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stage, n_microbatches, loss_fn, *specs, scale_grads, **options)


class PipelineScheduleMulti(NamedSchedule):
    """A schedule with several stages per rank, or any number; the first argument is a list of them."""


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards (arXiv 1811.06965)."""

    schedule_name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward, in turns (PipeDream-Flush, arXiv 2006.09503)."""

    schedule_name = "1F1B"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B with several stages per rank (arXiv 2104.04473)."""

    schedule_name = "Interleaved1F1B"


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """Several stages per rank, all microbatches through each before the next (arXiv 2211.05953)."""

    schedule_name = "LoopedBFS"


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B that fills its bubble with gradients of weights, at no more memory (arXiv 2401.10241)."""

    schedule_name = "ZB-H1"


class ScheduleZBH2(PipelineScheduleSingle):
    """The same without a bubble, at twice the memory (arXiv 2401.10241)."""

    schedule_name = "ZB-H2"


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Interleaved 1F1B whose gradients of weights wait (arXiv 2401.10241)."""

    schedule_name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """No bubble at 1F1B's memory: two stages per rank, placed there and back (arXiv 2401.10241)."""

    schedule_name = "ZBVZeroBubble"


class ScheduleVHalf(PipelineScheduleMulti):
    """Half of 1F1B's memory (arXiv 2405.15362)."""

    schedule_name = "V-Half"


class ScheduleVMin(PipelineScheduleMulti):
    """A third of 1F1B's memory (arXiv 2405.15362)."""

    schedule_name = "V-Min"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Forwards and backwards side by side (DeepSeek-V3, arXiv 2412.19437, cut to a V)."""

    schedule_name = "DualPipeV"


class ScheduleForwardOnly(PipelineScheduleMulti):
    """For inference: `step` and `eval` are the same."""

    schedule_name = "ForwardOnly"


_CLASSES: dict[str, type[NamedSchedule]] = {
    cls.schedule_name: cls
    for kind in (PipelineScheduleMulti, PipelineScheduleSingle)
    for cls in kind.__subclasses__()
    if cls.schedule_name
}


def get_schedule_class(schedule_name: str) -> type[NamedSchedule]:
    """The class of a schedule by its name, in any case, such as "1F1B", "ZBVZeroBubble" or "zb-h1".

    Raises: ScheduleError with the names there are.
    """
    return _CLASSES[find_schedule_kind(schedule_name).name]


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """torch's class for a schedule that comes from a CSV file, which `_load_csv` reads."""

    def __init__(self, stages: PipelineStage | Sequence[PipelineStage], n_microbatches: int, *args: Any, **kwargs: Any):
        self._given = (stages, n_microbatches, args, kwargs)

    def _load_csv(self, filename: str, format: str = "compute_only") -> None:
        """Takes the schedule from a file of computations, or, with "compute_comms", of computations and messages;
        messages are made again. Raises ScheduleError for a file of another number of microbatches, or that is no
        schedule."""
        stages, num_microbatches, args, kwargs = self._given
        if format not in ("compute_only", "compute_comms"):
            raise ScheduleError("_load_csv", f"format={format!r} is unknown.", "It is compute_only or compute_comms.")
        schedule = from_csv(Path(filename).read_text(encoding="utf-8"), filename).compute_only()
        if schedule.num_microbatches != num_microbatches:
            raise ScheduleError(
                "_load_csv",
                f"{filename} has {schedule.num_microbatches} microbatches, n_microbatches is {num_microbatches}.",
                "Give the number that the file was made for.",
            )
        PipelineSchedule.__init__(self, stages, schedule, *args, **kwargs)


_PipelineSchedule = PipelineSchedule
"""torch's name for it."""
