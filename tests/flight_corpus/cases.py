"""All cases of the corpus, in three sets, and where their runs are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from disttrain.flight_recorder.analysis.verdict import Kind
from tests.flight_corpus import absent, calls, gpu, healthy, messages, parallel, second, slow, third
from tests.flight_corpus.case import NCCL, Case

RUNS: Final = Path(__file__).parent / "runs"

_FIRST: Final[tuple[Case, ...]] = (
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
_ON_NCCL: Final = tuple(replace(case, backend=NCCL) for case in _FIRST if case.name in _ALSO_ON_NCCL)


def _as_over_nccl(case: Case) -> Case:
    """Who receives there from a rank for the first time connects to it, and waits: all do so before they send."""
    if case.run is healthy.messages_without_waiting:
        return replace(case, kind=Kind.MISSING_SEND, ranks=(0, 1, 2))
    return case


@dataclass(frozen=True)
class CaseSet:
    """`at_first` is how many the analyzer got wholly right before it had been mended for any of them."""

    title: str
    cases: tuple[Case, ...]
    at_first: int | None

    @property
    def kept(self) -> tuple[Case, ...]:
        """Those that have a run; over NCCL not all have."""
        return tuple(case for case in self.cases if (RUNS / f"{case.name}.tar.xz").exists())


SETS: Final = (
    CaseSet("first, over Gloo", _FIRST, None),
    CaseSet("second, over Gloo", tuple(second.CASES), 15),
    CaseSet("third, over Gloo", tuple(third.CASES), 10),
    CaseSet("over NCCL", (*gpu.CASES, *map(_as_over_nccl, _ON_NCCL)), 26),
)
CASES: Final = tuple(case for one in SETS for case in one.cases)
KEPT: Final = tuple(case for one in SETS for case in one.kept)

MISSED: Final[dict[str, str]] = {}
"""Runs that the analyzer gets wrong, and why."""
