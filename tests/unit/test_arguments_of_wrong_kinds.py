"""Arguments of the wrong kind get an answer, whichever function and whichever argument it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.pipelining as torchs

import disttrain
from disttrain import checkpoint, tp
from disttrain.errors import ArgumentError, DisttrainError, ScheduleError
from disttrain.pipelining import (
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    clip_grad_norm_,
    get_schedule_class,
    make_schedule,
    merge_chunks,
    split_args_kwargs_into_chunks,
    split_blocks,
)
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

SUM = disttrain.ReduceOp.SUM


def ones(num: int = 4) -> torch.Tensor:
    return torch.ones(num)


def four() -> list[torch.Tensor]:
    return [ones() for _ in range(4)]


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "all_gather": lambda: (four(), ones()),
    "all_gather_coalesced": lambda: ([[ones()] for _ in range(4)], [ones()]),
    "all_gather_into_tensor": lambda: (ones(16), ones()),
    "all_gather_into_tensor_coalesced": lambda: ([ones(16)], [ones()]),
    "all_gather_object": lambda: ([None] * 4, 1),
    "all_reduce": lambda: (ones(), SUM),
    "all_reduce_coalesced": lambda: ([ones()], SUM),
    "all_to_all": lambda: (four(), four()),
    "all_to_all_single": lambda: (ones(), ones(), [1] * 4, [1] * 4),
    "batch_isend_irecv": lambda: ([disttrain.P2POp(disttrain.isend, ones(), 1)],),
    "broadcast": lambda: (ones(), 0),
    "broadcast_object_list": lambda: ([1],),
    "gather": lambda: (ones(), four(), 0),
    "gather_object": lambda: (1, [None] * 4, 0),
    "get_global_rank": lambda: (None, 1),
    "get_group_rank": lambda: (None, 1),
    "init_device_mesh": lambda: ("cpu", (2, 2)),
    "irecv": lambda: (ones(), 1),
    "isend": lambda: (ones(), 1),
    "monitored_barrier": lambda: (None, 1.0),
    "new_group": lambda: ([0, 1], 5.0, "fake"),
    "new_subgroups": lambda: (2,),
    "new_subgroups_by_enumeration": lambda: ([[0, 1], [2, 3]],),
    "P2POp": lambda: (disttrain.isend, ones(), 1),
    "recv": lambda: (ones(), 1),
    "reduce": lambda: (ones(), 0, SUM),
    "reduce_scatter": lambda: (ones(), four(), SUM),
    "reduce_scatter_tensor": lambda: (ones(), ones(16), SUM),
    "reduce_scatter_tensor_coalesced": lambda: ([ones()], [ones(16)], SUM),
    "scatter": lambda: (ones(), four(), 0),
    "scatter_object_list": lambda: ([None], [1, 2, 3, 4], 0),
    "send": lambda: (ones(), 1),
    "send_object_list": lambda: ([1], 1),
    "split_group": lambda: (None, [[0, 1], [2, 3]]),
}
WRONG: tuple[Any, ...] = ([1], 7.5, "abc", ones(3), torch.ones(4, 4), [None] * 4, object(), np.ones(4), ("a",) * 4)


def _world() -> World:
    return World(HashStore(), 0, 4, backend="fake", timeout_s=1.0, device=torch.device("cpu"))


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_wrong_kinds_are_answered(name: str) -> None:
    """Some of them are right in some places; then nothing is to be said."""
    num_answers = 0
    with entered_world(_world()):
        function = getattr(disttrain, name)
        for place in range(len(ARGUMENTS[name]())):
            for wrong in WRONG:
                arguments = list(ARGUMENTS[name]())
                arguments[place] = wrong
                try:
                    function(*arguments)
                except DisttrainError as error:
                    num_answers += 1
                    assert error.remedy  # noqa: PT017  what is raised is one of many
    assert num_answers


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("send", lambda: disttrain.isend([1], 1)),  # type: ignore[arg-type]
        ("tensor_list is one tensor", lambda: disttrain.all_gather(torch.ones(4, 4), ones())),  # type: ignore[arg-type]
        ("is no ReduceOp", lambda: disttrain.all_reduce(ones(), "sum")),  # type: ignore[arg-type]
        ("and no list", lambda: disttrain.all_gather_object((None,) * 4, 1)),  # type: ignore[arg-type]
    ],
)
def test_what_is_said(name: str, call: Callable[[], object]) -> None:
    with entered_world(_world()), pytest.raises(ArgumentError, match=name):
        call()


def _stage() -> PipelineStage:
    return PipelineStage(torch.nn.Linear(2, 2), 0, 4, "cpu")


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: Schedule1F1B(wrong, 4),
        lambda wrong: Schedule1F1B(_stage(), wrong),
        lambda wrong: ScheduleInterleaved1F1B([wrong], 4),
        lambda wrong: PipelineSchedule(wrong, make_schedule("1F1B", 4, 4)),
        lambda wrong: PipelineStage(torch.nn.Linear(2, 2), 0, 4, wrong),
        get_schedule_class,
        lambda wrong: make_schedule("1F1B", wrong, 4),
        lambda wrong: split_blocks(wrong, 2),
        merge_chunks,
        lambda wrong: split_args_kwargs_into_chunks((ones(),), {}, wrong),
        lambda wrong: clip_grad_norm_([wrong, None], 1.0),  # type: ignore[list-item],
    ],
)
def test_pipelines_answer_too(call: Callable[[Any], object]) -> None:
    for wrong in (7.5, torch.ones(4, 4).long(), object(), {"a": 1}):
        with entered_world(_world()), pytest.raises(DisttrainError):
            call(wrong)


def test_torchs_stage_is_no_stage_of_ours() -> None:
    stage = object.__new__(torchs.PipelineStage)
    with entered_world(_world()), pytest.raises(ScheduleError, match=r"torch\.distributed\.pipelining.*disttrain's"):
        Schedule1F1B(stage, 4)


def _model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: checkpoint.save({}, wrong),
        lambda wrong: checkpoint.load({}, checkpoint_id=wrong),
        checkpoint.load_full,
        checkpoint.Checkpointer,
        checkpoint.get_model_state_dict,
        lambda wrong: checkpoint.get_model_state_dict(_model(), options=wrong),
        lambda wrong: checkpoint.get_optimizer_state_dict(_model(), wrong),
        lambda wrong: checkpoint.set_model_state_dict(_model(), [wrong]),  # type: ignore[arg-type]
        lambda wrong: checkpoint.set_state_dict(wrong, [], model_state_dict={}, optim_state_dict={}),
        checkpoint.training_state,
        lambda wrong: checkpoint.training_state(_model(), wrong),
        lambda wrong: tp.parallelize_module(wrong, disttrain.init_device_mesh("cpu", (4,)), tp.ColwiseParallel()),
        tp.plan_for,
    ],
)
def test_checkpoints_and_plans_answer_too(call: Callable[[Any], object]) -> None:
    for wrong in (7.5, torch.ones(4, 4).long(), object(), {"a": 1}):
        with entered_world(_world()), pytest.raises(DisttrainError):
            call(wrong)
