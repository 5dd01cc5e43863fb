"""The flight recorder: each rank's last calls, and, from all ranks' dumps, the cause of a hang.

In the job, `enable` records. The rest, like the command `disttrain-flight`, reads dumps without torch: each name below
is imported from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.flight_recorder.analysis.analysis import Analysis as Analysis
    from disttrain.flight_recorder.analysis.analysis import analyze as analyze
    from disttrain.flight_recorder.analysis.verdict import Kind as Kind
    from disttrain.flight_recorder.analysis.verdict import Verdict as Verdict
    from disttrain.flight_recorder.dumps.dump import Dump as Dump
    from disttrain.flight_recorder.dumps.dump import write_dump as write_dump
    from disttrain.flight_recorder.dumps.reading.reader import read_dump as read_dump
    from disttrain.flight_recorder.dumps.triggers import enable as enable
    from disttrain.flight_recorder.live.step_summaries import StepSummaries as StepSummaries
    from disttrain.flight_recorder.live.summary_outputs import PrometheusFile as PrometheusFile
    from disttrain.flight_recorder.live.summary_outputs import TensorBoardScalars as TensorBoardScalars
    from disttrain.flight_recorder.record.recorder import FlightRecorder as FlightRecorder

__getattr__, __dir__, __all__ = lazily(__name__)
