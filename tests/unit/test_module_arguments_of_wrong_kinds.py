"""What shards, parallelizes and saves models answers arguments of the wrong kind, as collectives do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import checkpoint, tp
from disttrain.dtensor import DTensor, Replicate, distribute_module, distribute_tensor
from disttrain.errors import DisttrainError
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads

WRONG: tuple[Any, ...] = (7, "x", None, [1], {"a": 1}, object(), torch.zeros(2))
TARGETS = torch.zeros(2, dtype=torch.long)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def mesh() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cpu", (1,))


def loss(**changed: Any) -> None:
    tp.vocab_parallel_cross_entropy(
        **{"logits": torch.randn(2, 4), "target": TARGETS, "vocab_size": 4, **changed}  # type: ignore[arg-type]
    )


def prepared(style: tp.ParallelStyle) -> None:
    tp.parallelize_module(linear(), mesh(), style)(ROWS)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def replicated() -> DTensor:
    return distribute_tensor(torch.zeros(2), mesh(), [Replicate()])


ROWS = torch.zeros(2, 3, 4)
STATE = {"a": torch.zeros(2)}
ON_MODULES: dict[str, Callable[[Any], object]] = {
    "loss logits": lambda wrong: loss(logits=wrong),
    "loss target": lambda wrong: loss(target=wrong),
    "loss group": lambda wrong: loss(group=wrong),
    "loss weight": lambda wrong: loss(weight=wrong),
    "loss reduction": lambda wrong: loss(reduction=wrong),
    "loss label_smoothing": lambda wrong: loss(label_smoothing=wrong),
    "loss ignore_index": lambda wrong: loss(ignore_index=wrong),
    "loss vocab_size": lambda wrong: loss(vocab_size=wrong),
    "columns input": lambda wrong: tp.parallelize_module(linear(), mesh(), tp.ColwiseParallel(input_layouts=wrong)),
    "columns output": lambda wrong: tp.parallelize_module(linear(), mesh(), tp.ColwiseParallel(output_layouts=wrong)),
    "rows input": lambda wrong: tp.parallelize_module(linear(), mesh(), tp.RowwiseParallel(input_layouts=wrong)),
    "rows output": lambda wrong: tp.parallelize_module(linear(), mesh(), tp.RowwiseParallel(output_layouts=wrong)),
    "sequence_dim": lambda wrong: tp.parallelize_module(
        nn.LayerNorm(4), mesh(), tp.SequenceParallel(sequence_dim=wrong)
    )(ROWS),
    "prepared input": lambda wrong: prepared(tp.PrepareModuleInput(input_layouts=wrong, desired_input_layouts=wrong)),
    "prepared output": lambda wrong: prepared(
        tp.PrepareModuleOutput(output_layouts=wrong, desired_output_layouts=wrong)
    ),
    "parallelized module": lambda wrong: tp.parallelize_module(wrong, mesh(), tp.ColwiseParallel()),
    "parallelized mesh": lambda wrong: tp.parallelize_module(linear(), wrong, tp.ColwiseParallel()),
    "parallelized plan": lambda wrong: tp.parallelize_module(linear(), mesh(), wrong),
    "distributed tensor's mesh": lambda wrong: distribute_tensor(torch.zeros(2), wrong, [Replicate()]),
    "distributed tensor's placements": lambda wrong: distribute_tensor(torch.zeros(2), mesh(), wrong),
    "distributed module": lambda wrong: distribute_module(wrong, mesh()),
    "redistributed": lambda wrong: replicated().redistribute(placements=wrong),
    "from_local": lambda wrong: DTensor.from_local(wrong, mesh(), [Replicate()]),
    "mesh shape": lambda wrong: disttrain.init_device_mesh("cpu", wrong),
    "mesh names": lambda wrong: disttrain.init_device_mesh("cpu", (1,), mesh_dim_names=wrong),
    "sharded module": fully_shard,
    "sharded mesh": lambda wrong: fully_shard(linear(), mesh=wrong),
    "reshard_after_forward": lambda wrong: fully_shard(linear(), reshard_after_forward=wrong),
    "mp_policy": lambda wrong: fully_shard(linear(), mp_policy=wrong),
    "offload_policy": lambda wrong: fully_shard(linear(), offload_policy=wrong),
    "ignored_params": lambda wrong: fully_shard(linear(), ignored_params=wrong),
    "shard_placement_fn": lambda wrong: fully_shard(linear(), shard_placement_fn=wrong),
    "model of a state dict": lambda wrong: checkpoint.get_state_dict(wrong, []),
    "optimizers of a state dict": lambda wrong: checkpoint.get_state_dict(linear(), wrong),
    "submodules": lambda wrong: checkpoint.get_model_state_dict(linear(), submodules=wrong),
    "options": lambda wrong: checkpoint.get_model_state_dict(linear(), options=wrong),
    "model state": lambda wrong: checkpoint.set_model_state_dict(linear(), wrong),
    "optimizer state": lambda wrong: checkpoint.set_optimizer_state_dict(model := linear(), sgd(model), wrong),
    "random state": checkpoint.set_rng_state,
    "random generators": lambda wrong: checkpoint.set_rng_state({"generators": wrong}),
}
# `checkpoint_id` of a path is right where a path is given; the folder is the test's own.
ON_DISK: dict[str, Callable[[Any], object]] = {
    "saved state": lambda wrong: checkpoint.save(wrong, checkpoint_id="state"),
    "saved to": lambda wrong: checkpoint.save(STATE, checkpoint_id=wrong),
    "saved by": lambda wrong: checkpoint.save(STATE, storage_writer=wrong),
    "saved by plan": lambda wrong: checkpoint.save(STATE, checkpoint_id=f"plan {id(wrong)}", planner=wrong),
    "saved later": lambda wrong: checkpoint.async_save(STATE, checkpoint_id=wrong).result(),
    "written to": lambda wrong: checkpoint.save(STATE, storage_writer=checkpoint.FileSystemWriter(wrong)),
    "written by Hugging Face": lambda wrong: checkpoint.save(
        STATE, storage_writer=checkpoint.HuggingFaceStorageWriter(wrong)
    ),
    "files by name": lambda wrong: checkpoint.HuggingFaceStorageWriter("hf", fqn_to_index_mapping=wrong),
    "loaded state": lambda wrong: checkpoint.load(wrong, checkpoint_id="there"),
    "loaded from": lambda wrong: checkpoint.load(STATE, checkpoint_id=wrong),
    "loaded by plan": lambda wrong: checkpoint.load(STATE, checkpoint_id="there", planner=wrong),
    "read from": lambda wrong: checkpoint.load(STATE, storage_reader=checkpoint.FileSystemReader(wrong)),
    "converted from": lambda wrong: checkpoint.dcp_to_torch_save(wrong, "file"),
    "converted to": lambda wrong: checkpoint.dcp_to_torch_save("there", wrong),
    "converted from torch": lambda wrong: checkpoint.torch_save_to_dcp(wrong, "to"),
    "storage": lambda wrong: checkpoint.Checkpointer("checkpoints", storage=wrong),
}


def answered(call: Callable[[Any], object]) -> None:
    """Some of them are right in some places; then nothing is to be said."""
    num_answers = 0
    for wrong in WRONG:
        try:
            call(wrong)
        except DisttrainError as error:
            num_answers += 1
            assert len(str(error).split(".")) > 1  # noqa: PT017  what is raised is one of many
    assert num_answers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_MODULES)
def test_what_models_are_given(name: str) -> None:
    run_threads(1, lambda: answered(ON_MODULES[name]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_DISK)
def test_what_saves_are_given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def body() -> None:
        checkpoint.save(STATE, checkpoint_id="there")
        answered(ON_DISK[name])

    run_threads(1, body)
