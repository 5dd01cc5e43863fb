"""Faults in pipelines, sharded modules and meshes."""

from __future__ import annotations

import os
import signal
import time

import disttrain
from disttrain.flight_recorder.analysis.verdict import Cause, Kind
from tests.flight_corpus.case import Cases, labelled
from tests.flight_corpus.tensors import ones
from tests.flight_corpus.training import by_hand, meshed, pipeline, sharded

CASES: Cases = []


@labelled(CASES, Kind.RANK_ABSENT, 1, cause=Cause.IN_PYTHON, says="microbatch")
def pipeline_stage_sleeps(rank: int) -> None:
    def hook(num_passes: int) -> None:
        if rank == 1 and num_passes == 3:
            time.sleep(1000)

    pipeline(rank, 3, hook=hook)


@labelled(CASES, Kind.RANK_ABSENT, 2, cause=Cause.RAISED, says="FloatingPointError")
def pipeline_stage_raises(rank: int) -> None:
    def hook(num_passes: int) -> None:
        if rank == 2 and num_passes == 2:
            raise FloatingPointError("not a number")

    pipeline(rank, 3, hook=hook)


@labelled(CASES, Kind.RANK_ABSENT, 0, cause=Cause.DEAD)
def pipeline_stage_is_killed(rank: int) -> None:
    def hook(num_passes: int) -> None:
        if rank == 0 and num_passes == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    pipeline(rank, 3, hook=hook)


@labelled(CASES, Kind.RANK_ABSENT, 0, 1, cause=Cause.RAISED, num_ranks=2, says="Give all ranks the same")
def pipeline_of_two_schedules(rank: int) -> None:
    """disttrain's own pipelines notice; the next ones are made by hand."""
    pipeline(rank, 2, name="GPipe" if rank == 1 else "1F1B")


# Each waits to receive what the other sends only after it has received: neither has left out a send for good.
@labelled(CASES, Kind.MISSING_SEND, 0, 1, num_ranks=2, says="stage 1 microbatch 2 F")
def schedules_that_do_not_fit(rank: int) -> None:
    """The first stage wants a gradient before its third microbatch, the last one all microbatches first."""
    by_hand(rank, 2, "F0 F1 F2 F3 B0 B1 B2 B3" if rank else "F0 F1 B0 F2 B1 F3 B2 B3")


@labelled(CASES, Kind.MISSING_SEND, 1, 2, says="stage 2 microbatch 2 F")
def last_stage_has_another_schedule(rank: int) -> None:
    by_hand(rank, 3, "F0 F1 F2 F3 B0 B1 B2 B3" if rank == 2 else "F0 F1 B0 F2 B1 F3 B2 B3")


@labelled(CASES, Kind.MISSING_SEND, 0, num_ranks=2, says="stage 1 microbatch 3 F")
def stage_leaves_out_a_microbatch(rank: int) -> None:
    by_hand(rank, 2, "F0 F1 F2 F3" if rank else "F0 F1 F2")


@labelled(CASES, Kind.RANK_ABSENT, 1, cause=Cause.IN_PYTHON, says="forward")
def sharded_layer_sleeps(rank: int) -> None:
    def hook(num_passes: int) -> None:
        if rank == 1 and num_passes == 4:
            time.sleep(1000)

    sharded(rank, 6, hook=hook)


@labelled(CASES, Kind.MISMATCHED_SIZES, 2)
def sharded_layer_skipped(rank: int) -> None:
    sharded(rank, 4, skips=rank == 2)


@labelled(CASES, Kind.RANK_ABSENT, 3, cause=Cause.STOPPED, num_ranks=4)
def mesh_rank_stopped(rank: int) -> None:
    def before(_mesh: disttrain.DeviceMesh, number: int) -> None:
        if rank == 3 and number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)

    meshed(6, before)


@labelled(CASES, Kind.RANK_ABSENT, 2, cause=Cause.IN_IO, num_ranks=4, says="axis ")
def mesh_rank_reads(rank: int) -> None:
    def before(_mesh: disttrain.DeviceMesh, number: int) -> None:
        if rank == 2 and number == 3:
            os.read(os.pipe()[0], 1)

    meshed(6, before)


@labelled(CASES, Kind.WAIT_CYCLE, 0, 1, 2, 3, num_ranks=4, says="axis ")
def mesh_axes_in_another_order(rank: int) -> None:
    """Ranks 0 and 3 take the axes in one order, 1 and 2 in the other: each waits for its neighbour."""

    def before(mesh: disttrain.DeviceMesh, number: int) -> None:
        if number == 3:
            for axis in ("dp", "tp") if rank in (1, 2) else ("tp", "dp"):
                disttrain.all_reduce(ones(4), group=mesh[axis].get_group())

    meshed(6, before)
