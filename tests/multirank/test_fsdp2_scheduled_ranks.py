"""Sharded modules that a schedule gathers, frees and reduces, on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import disttrain
from disttrain.fsdp2 import CPUOffloadPolicy, TransferPolicy, share_comm_ctx
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2_scheduled import (
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    Pipeline,
    assert_same_gradients,
    backward_of,
    own_tokens,
    schedule,
    shard,
    two_stages,
)


def check_steps(text: str, **options: object) -> None:
    """Two steps, whose gradients add up, equal those of a single process."""
    reference = two_stages()
    stages = [shard(copy.deepcopy(stage), **options) for stage in reference]
    share_comm_ctx(stages)
    schedule(*stages)
    for step in range(2):
        pipeline = Pipeline(stages, own_tokens(step))
        pipeline.run(text)
        pipeline.finish()
        backward_of(reference, step)
    assert_same_gradients(stages, reference)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("text", [ONE_F_ONE_B, ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_gradients_equal_those_of_a_single_process(text: str) -> None:
    check_steps(text)


@on_ranks(4)
def test_replicas_are_summed_over() -> None:
    check_steps(ZERO_BUBBLE, mesh=disttrain.init_device_mesh("cpu", (2, 2)))


@on_ranks(2)
def test_shards_may_be_kept_on_the_host() -> None:
    check_steps(ZERO_BUBBLE, offload_policy=CPUOffloadPolicy())


@on_ranks(2, 3)
@pytest.mark.parametrize("asked", [{"form": "in_place"}, {"form": "mixed"}, {"together": 2}], ids=str)
def test_values_do_not_depend_on_the_form_of_transfers(asked: dict[str, Any]) -> None:
    check_steps(ZERO_BUBBLE, transfer_policy=TransferPolicy(**asked))
