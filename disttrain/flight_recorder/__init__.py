"""The flight recorder: what each rank called last, and, from all ranks' dumps, why a job hangs.

In the job, `enable` records; the rest, like the command `disttrain-flight`, reads dumps and does without torch: each
name below is fetched from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.flight_recorder.analysis import Analysis as Analysis
    from disttrain.flight_recorder.analysis import analyze as analyze
    from disttrain.flight_recorder.dump import Dump as Dump
    from disttrain.flight_recorder.dump import write_dump as write_dump
    from disttrain.flight_recorder.dump_reader import read_dump as read_dump
    from disttrain.flight_recorder.recorder import FlightRecorder as FlightRecorder
    from disttrain.flight_recorder.step_summaries import StepSummaries as StepSummaries
    from disttrain.flight_recorder.summary_outputs import PrometheusFile as PrometheusFile
    from disttrain.flight_recorder.summary_outputs import TensorBoardScalars as TensorBoardScalars
    from disttrain.flight_recorder.triggers import enable as enable
    from disttrain.flight_recorder.verdict import Kind as Kind
    from disttrain.flight_recorder.verdict import Verdict as Verdict

_MODULE_OF = {
    "Analysis": "analysis",
    "Dump": "dump",
    "FlightRecorder": "recorder",
    "Kind": "verdict",
    "PrometheusFile": "summary_outputs",
    "StepSummaries": "step_summaries",
    "TensorBoardScalars": "summary_outputs",
    "Verdict": "verdict",
    "analyze": "analysis",
    "enable": "triggers",
    "read_dump": "dump_reader",
    "write_dump": "dump",
}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605

__getattr__, __dir__ = lazily(__name__, _MODULE_OF)
