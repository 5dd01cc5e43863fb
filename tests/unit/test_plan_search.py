"""The search finds what trying everything finds, and what it says would make a mesh fit does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from disttrain.errors import ScheduleError, SettingError
from disttrain.plan import HARDWARE, PRESETS, Job, LlamaSizes, MeshSizes, find_plans, plan_of, search
from disttrain.plan.job import PURE, meshes, why_not
from disttrain.plan.reasons import why_first, why_not_first
from disttrain.plan.search import choices, leanest
from disttrain.plan.time.traffic import traffic_of

JOB = Job(PRESETS["8b"], 8, HARDWARE["h100"], node_size=4, num_sequences=32)
SMALL = Job(PRESETS["8b"], 8, HARDWARE["a100-40"], seq_size=4096, num_sequences=64)


def test_it_finds_the_best() -> None:
    """Step times to a hundredth: in which order choices are looked at rests on an estimate."""
    schedules = ("1F1B", "ZBVZeroBubble")
    found = find_plans(JOB, num_plans=3, schedules=schedules)
    best: dict[tuple[int, int], float] = {}
    for mesh in meshes(JOB):
        for choice in choices(JOB, mesh, schedules) if why_not(JOB, mesh) is None else ():
            try:
                plan = plan_of(JOB, choice)
            except ScheduleError:
                continue
            if plan.fits(JOB):
                kind = mesh.pp, mesh.tp
                best[kind] = min(best.get(kind, float("inf")), plan.times.step_s)
    assert [plan.times.step_s for plan in found.plans] == pytest.approx(sorted(best.values())[:3], rel=0.01)
    assert all(plan.fits(JOB) for plan in found.plans)
    assert len({(plan.choice.mesh.pp, plan.choice.mesh.tp) for plan in found.plans}) == 3


def test_tensor_parallel_stays_within_nodes() -> None:
    job = Job(LlamaSizes(48, 2, 6, 6, 96, 100), 24, node_size=8)
    assert {mesh.tp for mesh in meshes(job)} == {1, 2, 4, 8}  # of groups of 3, every third would lie on two nodes


def test_schedules_that_cannot_be_made_are_left_out() -> None:
    """Interleaved1F1B cannot do 18 or 9 microbatches on 4 ranks, and 1F1B can."""
    job, mesh = replace(JOB, num_sequences=36), MeshSizes(pp=4, dp=2)
    assert find_plans(job, schedules=["Interleaved1F1B"], mesh=mesh).plans == ()
    (plan,) = find_plans(job, schedules=["Interleaved1F1B", "1F1B"], mesh=mesh).plans
    assert plan.choice.schedule == "1F1B"


def test_a_tied_matrix_wants_the_ends_of_a_pipeline_apart() -> None:
    job, mesh = replace(JOB, sizes=replace(JOB.sizes, is_tied=True)), MeshSizes(pp=4, dp=2)
    assert find_plans(job, schedules=["ZBVZeroBubble"], mesh=mesh).plans == ()
    (plan,) = find_plans(job, schedules=["ZBVZeroBubble", "1F1B"], mesh=mesh).plans
    assert plan.choice.schedule == "1F1B"
    # Beside activations the ends tell each other the matrix's gradient, of which each rank has its shard.
    untied = replace(job, sizes=replace(job.sizes, is_tied=False))
    sent, sent_untied = (
        next(one for one in traffic_of(which, plan.choice) if one.axis == "pp") for which in (job, untied)
    )
    assert sent.num_calls == sent_untied.num_calls + 1
    assert sent.sent_bytes - sent_untied.sent_bytes == job.sizes.vocab_elements // 2 * job.precision.parameter_bytes


def test_every_mesh_has_all_gpus() -> None:
    found = list(meshes(JOB))
    assert len(found) == len(set(found))
    assert {mesh.num_gpus for mesh in found} == {JOB.num_gpus}
    assert max(mesh.tp for mesh in found) == JOB.node_size


def test_remedies_are_true() -> None:
    tight = replace(SMALL, hardware=SMALL.hardware.with_changes(memory_gib=20))
    plans = find_plans(tight, num_plans=8)
    assert plans.misfits
    seen = set()
    for misfit in plans.misfits:
        mesh = misfit.plan.choice.mesh
        assert not misfit.plan.fits(tight)
        for remedy in misfit.remedies:
            number = int(re.findall(r"\d+", remedy)[-1])
            if remedy.startswith("GPUs of"):
                better, wider = replace(tight, hardware=tight.hardware.with_changes(memory_gib=number)), mesh
            elif remedy.startswith("dp="):
                better = replace(tight, num_gpus=number)
                wider = replace(mesh, dp=mesh.dp * number // tight.num_gpus)
            else:
                better, wider = replace(tight, seq_size=number), mesh
            plan = leanest(better, wider)
            assert plan is not None
            assert plan.fits(better), remedy
            seen.add(remedy.split()[0][:2])
    assert seen == {"GP", "dp", "se"}


def test_reasons_add_up() -> None:
    plans = find_plans(JOB, num_plans=3)
    assert any("of the step is computing" in line for line in why_first(plans))
    assert all(re.match(r"\+\d+\.\d%: ", why_not_first(plan, plans.plans[0])) for plan in plans.plans[1:])


def test_one_mesh_alone() -> None:
    mesh = MeshSizes(dp=4, tp=2)
    assert [plan.choice.mesh for plan in find_plans(JOB, mesh=mesh).plans] == [mesh]
    wrong = find_plans(JOB, mesh=MeshSizes(tp=3))
    assert wrong.plans == ()
    assert list(wrong.refused.values()) == [1]


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (MeshSizes(tp=3), "does not divide heads"),
        (MeshSizes(pp=33), "needs as many layers"),
        (MeshSizes(dp=5), "do not divide among 5 ranks"),
    ],
)
def test_rules(mesh: MeshSizes, words: str) -> None:
    assert words in (why_not(JOB, mesh) or "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_gpus": 7}, "do not fill nodes of 4"),
        ({"num_sequences": 0}, "num_sequences is 0"),
        ({"memory_share": 1.5}, "memory_share is 1.5"),
        ({"hardware": HARDWARE["a100"], "uses_float8": True}, "has no float8"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        replace(JOB, **changes)  # type: ignore[arg-type]


HUGE = Job(PRESETS["405b"], 131_072, HARDWARE["h100"])


def test_a_batch_that_is_too_small_is_named_and_so_is_what_would_fit() -> None:
    """At 131,072 GPUs: a larger batch, a deeper pipeline, fewer GPUs, each of which has room."""
    plans = find_plans(HUGE)
    assert plans.plans == ()
    cause, batch, deeper, fewer = plans.why_nothing
    assert cause.startswith(
        "The batch: 512 sequences a step do not divide among the ranks of dp, which are 1024 or more"
    )
    tokens = re.search(r"--batch-tokens (\d+)", batch)
    assert tokens
    assert find_plans(replace(HUGE, num_sequences=int(tokens[1]) // HUGE.seq_size), num_plans=1).plans
    assert "--mesh pp=32,dp=512,tp=8" in deeper
    assert find_plans(HUGE, num_plans=1, mesh=MeshSizes(pp=32, dp=512, tp=8)).plans
    num_gpus = int(fewer.split()[0])
    assert num_gpus < HUGE.num_gpus
    assert find_plans(replace(HUGE, num_gpus=num_gpus), num_plans=1).plans


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (replace(JOB, hardware=HARDWARE["a100"].with_changes(memory_gib=2)), "Memory: no mesh has room"),
        (replace(JOB, num_gpus=148, num_sequences=20), "The batch: 20 sequences a step do not divide"),
        (
            Job(LlamaSizes(64, 1, 4, 4, 96, 100), 7, node_size=7, precision=PURE),
            "The model: without fully_shard there is no dp",
        ),
    ],
)
def test_the_cause_is_named(job: Job, words: str) -> None:
    plans = find_plans(job)
    assert plans.plans == ()
    assert plans.why_nothing[0].startswith(words)


def test_work_grows_with_the_divisors_of_the_gpus_and_not_with_these(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Counter[str]] = []
    for name in ("why_not", "likely_s", "times_of", "memory_of"):
        monkeypatch.setattr(search, name, partial(counted, counts, name, getattr(search, name)))
    for num_gpus in (1024, 131_072):
        counts.append(Counter())
        job = Job(PRESETS["8b"], num_gpus, HARDWARE["h100"], num_sequences=4 * num_gpus)
        assert find_plans(job, num_plans=1, schedules=("1F1B",)).plans
    few, many = counts
    # Meshes, and choices on them, are as many as these have ways to be cut; those that are looked at closely are few.
    assert all(many[name] <= 4 * few[name] for name in ("why_not", "likely_s"))
    assert all(many[name] <= 2 * few[name] for name in ("times_of", "memory_of"))


def counted(counts: list[Counter[str]], name: str, call: Callable[..., object], *arguments: object) -> object:
    counts[-1][name] += 1
    return call(*arguments)
