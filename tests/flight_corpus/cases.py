"""All cases of the corpus, and where their runs are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.flight_corpus import absent, calls, gpu, healthy, messages, parallel, second, slow
from tests.flight_corpus.case import NCCL, Case

RUNS: Final = Path(__file__).parent / "runs"
ON_GLOO: Final[tuple[Case, ...]] = (
    *absent.CASES,
    *calls.CASES,
    *messages.CASES,
    *parallel.CASES,
    *slow.CASES,
    *healthy.CASES,
)

_ALSO_ON_NCCL: Final = {
    *("sleeps", "endless_loop", "data_loader_reads_an_empty_pipe", "interpreter_lock_held_in_c", "ends_early"),
    *("stopped", "killed", "raises", "leaves_out_a_call"),
    *("branch_into_a_broadcast", "uneven_batch", "one_rank_in_double", "another_root_of_a_broadcast"),
    *("two_sizes_at_once_in_another_order", "two_groups_in_another_order", "circle_over_three_groups"),
    *("no_send", "no_receive", "both_receive_first", "chain_of_receives", "pipeline_stage_sleeps"),
    *("slow_data", "sharded_layer_sleeps", "mesh_rank_stopped"),
    *("all_reduces", "every_collective", "groups_of_two", "messages_without_waiting", "sharded_layers"),
    *("pipeline_of_three", "signalled_while_it_trains"),
}
ON_NCCL: Final[tuple[Case, ...]] = (
    *gpu.CASES,
    *(replace(case, backend=NCCL) for case in ON_GLOO if case.name in _ALSO_ON_NCCL),
)
CASES: Final = (*ON_GLOO, *ON_NCCL, *second.CASES)
