"""Random programs on DTensors give what plain tensors give. More of them: `python -m tests.dtensor_programs`."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from disttrain.dtensor import Replicate, Shard
from tests.dtensor_programs import run
from tests.dtensor_programs.execute import plain_redistribute
from tests.dtensor_programs.generate import generate
from tests.dtensor_programs.program import Leaf, Program, Ref, Step, source
from tests.dtensor_programs.run import run_program
from tests.dtensor_programs.shrink import shrunk


def test_a_program_is_a_function_of_its_seed() -> None:
    assert [generate(seed) for seed in range(20)] == [generate(seed) for seed in range(20)]
    assert len({source(generate(seed)) for seed in range(20)}) == 20


def test_what_fails_is_made_small() -> None:
    leaf, other = (Leaf((4, 3), torch.float64, seed, requires_grad=True) for seed in (1, 2))
    steps = (
        Step(1, "leaf", (leaf, (Shard(0),))),
        Step(2, "leaf", (other, (Replicate(),))),
        Step(3, ".mul", (Ref(1), Ref(2))),
        Step(4, ".exp", (Ref(3),)),
        Step(5, "redistribute", (Ref(4), (Replicate(),))),
        Step(6, ".add_", (Ref(1), Ref(5)), without_grad=True),
    )
    program = Program((2,), steps)
    assert not run_program(program).fault
    with mock.patch.object(run, "redistribute", lambda tensor, placements: plain_redistribute(tensor, placements) + 1):
        verdict = shrunk(run_program(program))
    assert verdict.fault == "silent"
    assert [step.function for step in verdict.program.steps] == ["leaf", "redistribute"]
    assert verdict.program.steps[0].args == (Leaf((1, 1), torch.float64, 1), (Replicate(),))
    assert "v5 = redistribute(v1, (Replicate(),))" in source(verdict.program)


def test_rounding_is_no_fault() -> None:
    leaf = Leaf((3,), torch.float64, 1)
    steps = (
        Step(1, "leaf", (leaf, (Shard(0),))),
        Step(2, ".sum", (Ref(1),)),
        Step(3, "torch.nextafter", (Ref(2), Ref(1)), rounds=True),
        Step(4, ".sub", (Ref(3), Ref(2))),
        Step(5, ".sign", (Ref(4),)),
    )
    assert run.shaky_values(Program((1,), steps)) == {"v5"}
    assert not run.shaky_values(Program((1,), tuple(replace(step, rounds=False) for step in steps)))


def test_what_cancels_out_and_the_sign_of_zero_are_no_fault() -> None:
    leaf = Leaf((3,), torch.float64, 1)
    cancelled = (
        Step(1, "leaf", (leaf, (Shard(0),))),
        Step(2, ".mul", (Ref(1), 3), rounds=True),
        Step(3, ".sub", (Ref(2), Ref(2))),
        Step(4, ".add", (Ref(3), Ref(1)), rounds=True),
        Step(5, ".sub", (Ref(4), Ref(1)), rounds=True),
        Step(6, ".sqrt", (Ref(5),)),
    )
    assert run.shaky_values(Program((1,), cancelled)) == {"v6"}
    signed = (
        Step(1, "leaf", (leaf, (Shard(0),))),
        Step(2, ".mul", (Ref(1), -0.0)),
        Step(3, ".copysign", (Ref(1), Ref(2))),
    )
    assert run.shaky_values(Program((1,), signed)) == {"v3"}


SEEDS_EACH = 11


@pytest.mark.sweep(2)
@pytest.mark.parametrize("first_seed", range(0, 6 * SEEDS_EACH, SEEDS_EACH))
def test_programs(first_seed: int) -> None:
    programs = [generate(seed) for seed in range(first_seed, first_seed + SEEDS_EACH)]
    for world_size in (1, 2, 3, 4):
        for verdict in run.run_programs([one for one in programs if one.world_size == world_size]):
            assert not verdict.fault, f"seed {verdict.program.seed}: {verdict.text}\n{source(verdict.program)}"
