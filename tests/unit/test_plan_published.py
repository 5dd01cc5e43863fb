"""The planner's estimates beside jobs of 64 to 16,384 GPUs that others have published, of which two choices were
made with them in sight: the rate of products on A100, within what runs of FSDP on 8 to 64 of them allow, and the stages
of each rank where a source does not say them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from disttrain.plan import HARDWARE, PRESETS, Choice, Job, MeshSizes, find_plans, plan_of
from disttrain.plan.model.memory import has_room
from disttrain.plan.reasons import why_first
from disttrain.plan.search import choices
from disttrain.plan.time import times
from disttrain.plan.time.products import product_s

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "plans" / "published.py"
POINTS = 0.04
"""Of the peak."""


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_jobs", PUBLISHED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


PUBLISHED_JOBS = _loaded()
JOBS, MIXTURES = PUBLISHED_JOBS.JOBS, PUBLISHED_JOBS.MIXTURES


@pytest.mark.parametrize("published", JOBS, ids=lambda published: published.name)
def test_the_mesh_that_they_ran_on(published: object) -> None:
    plan = plan_of(published.job, published.choice)  # type: ignore[attr-defined]
    assert plan.utilization(published.job) == pytest.approx(published.utilization, abs=POINTS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("published", MIXTURES[:2], ids=lambda published: published.name)
def test_mixtures_whose_exchange_stays_on_a_host(published: object) -> None:
    """Nothing in their estimates was made with them in sight."""
    plan = plan_of(published.job, published.choice)  # type: ignore[attr-defined]
    assert plan.utilization(published.job) == pytest.approx(published.utilization, abs=POINTS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("published", MIXTURES[2:], ids=lambda published: published.name)
def test_mixtures_whose_exchange_leaves_the_host(published: object) -> None:
    """They lie between what all of it hidden and none of it hidden would give."""
    hidden, exposed = published.job, PUBLISHED_JOBS.exposed(published)  # type: ignore[attr-defined]
    most, least = (plan_of(job, published.choice).utilization(job) for job in (hidden, exposed))  # type: ignore[attr-defined]
    assert least < published.utilization < most  # type: ignore[attr-defined]


def test_its_own_choice_for_a_large_job() -> None:
    """With more than two stages for each rank; in 80 GB, blocks are recomputed, and it says what memory forbids."""
    published = next(published for published in JOBS if published.job.num_gpus == 16_384)
    job = published.job
    plans = find_plans(job, num_plans=1)
    first = plans.plans[0]
    assert first.choice.stages_per_rank is not None
    assert first.choice.stages_per_rank > 2
    assert first.utilization(job) > 0.34
    # What it tells for the mesh that was published must be its choice, or be said to lack room.
    known = plan_of(job, published.choice)
    fastest = plans.without_room
    assert not known.fits(job)
    assert fastest is not None
    assert not fastest.fits(job)
    assert fastest.utilization(job) >= known.utilization(job)
    (sentence,) = (line for line in why_first(plans) if line.startswith("Memory forbids the fastest: "))
    assert f"take {fastest.memory.total_bytes / 2**30:.1f} GiB" in sentence


def test_with_room_it_chooses_what_is_fastest() -> None:
    job = Job(PRESETS["8b"], 16, HARDWARE["h200"], num_sequences=64)
    plans = find_plans(job, num_plans=1)
    roomy = replace(job, hardware=replace(job.hardware, memory_gib=10_000.0))
    fastest = find_plans(roomy, num_plans=1)
    assert fastest.without_room is None
    (best,) = fastest.plans
    if plans.without_room is None:
        assert plans.plans[0].choice == best.choice
    else:
        assert plans.without_room.choice == best.choice


def test_more_stages_for_each_rank_wait_less() -> None:
    job = Job(PRESETS["70b"], 128, HARDWARE["h100"], num_sequences=64)
    mesh = MeshSizes(pp=8, dp=2, tp=8)
    bubbles = [
        plan_of(job, Choice(mesh, 1, 32, "Interleaved1F1B", stages_per_rank=number)).times.bubble
        for number in (None, 5, 10)
    ]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[0] > 1.5 * bubbles[2]


def test_the_search_looks_at_more_stages_where_they_pay() -> None:
    job = Job(PRESETS["70b"], 128, HARDWARE["h100"], num_sequences=64)
    few = {choice.stages_per_rank for choice in choices(job, MeshSizes(pp=8, dp=2, tp=8))}
    assert few == {None, 5}
    many = replace(job, num_sequences=2 * 4096)
    alone = [choice for choice in choices(many, MeshSizes(pp=8, dp=2, tp=8)) if choice.microbatch_size == 1]
    assert {choice.stages_per_rank for choice in alone} == {None}


def test_a_product_is_slower_where_tiles_leave_multiprocessors_idle() -> None:
    hardware = HARDWARE["h100"]

    def rate(rows: int, columns: int) -> float:
        return 2 * rows * columns * 4096 / product_s(hardware, hardware.matmul_flops, rows, columns, 4096)

    assert rate(8192, 8192) == pytest.approx(hardware.matmul_flops)
    shapes = [(rows, columns) for rows in (64, 256, 1024, 8192) for columns in (512, 2048, 16_384)]
    assert max(rate(*shape) for shape in shapes) <= hardware.matmul_flops * (1 + 1e-9)
    assert rate(256, 512) < 0.3 * rate(8192, 2048)
    # One tile more than there are multiprocessors takes a second round.
    assert rate(128 * 133, 256) < 0.75 * rate(128 * 132, 256)


def test_tensor_parallel_of_many_ranks_hides_less() -> None:
    """Of the same bytes: parts of an eighth of a sequence are too few rows for a GPU."""
    job = Job(PRESETS["405b"], 1024, HARDWARE["h100"], num_sequences=64)
    shares = []
    for tp in (2, 8):
        found = plan_of(job, Choice(MeshSizes(pp=2, dp=512 // tp, tp=tp), 1, 64 * tp // 512 or 1, "1F1B")).times
        shares.append(found.tp / found.compute)
    assert shares[1] > 4 * shares[0]


def test_what_lacks_room_is_what_takes_more_than_there_is() -> None:
    job = Job(PRESETS["8b"], 16, HARDWARE["a100-40"], num_sequences=64)
    found = set()
    for choice in choices(job, MeshSizes(pp=2, dp=2, tp=4)):
        fits = plan_of(job, choice).fits(job)
        assert has_room(job, choice) == fits
        found.add(fits)
    assert found == {False, True}


def test_planning_for_many_gpus_simulates_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    simulate = times.simulate
    for num_gpus in (1024, 16_384):
        calls: list[int] = []
        monkeypatch.setattr(times, "simulate", lambda *given, calls=calls: calls.append(1) or simulate(*given))
        times._even_rhythm.cache_clear()
        times._played.cache_clear()
        job = Job(PRESETS["405b"], num_gpus, HARDWARE["h200"], num_sequences=num_gpus // 8)
        find_plans(job, num_plans=2, schedules=("1F1B", "Interleaved1F1B"))
        counts.append(len(calls))
    assert counts[1] <= 2 * counts[0]
    assert max(counts) < 120
