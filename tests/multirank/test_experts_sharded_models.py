"""Models of transformers with experts over ranks, sharded, cut and checkpointed, train like one process of their own
modules in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import checkpoint, kernels
from disttrain.compiling import compile_blocks
from disttrain.dtensor import DTensor
from disttrain.errors import CompileError
from disttrain.experts import shard_experts, use_experts
from disttrain.fsdp2 import fully_shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_transformers import expert_model, loss_of, sentences, with_our_experts

LAYERS = "model.layers.*"


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_trains_alike(
    model: nn.Module,
    whole: nn.Module,
    position: tuple[int, int],
    make: Callable[..., Any] = torch.optim.AdamW,
    num_steps: int = 3,
) -> None:
    """Losses, gradients, norms and parameters; `position`: of this rank's batch, among how many."""
    index, count = position
    mine, theirs = make(model.parameters(), lr=0.02), make(whole.parameters(), lr=0.02)
    for step in range(num_steps):
        tokens = sentences(step)
        loss, expected = loss_of(model, tokens.chunk(count)[index]), loss_of(whole, tokens)
        loss.backward()
        expected.backward()
        sum_of_losses = loss.detach().clone()
        disttrain.all_reduce(sum_of_losses)
        torch.testing.assert_close(sum_of_losses / disttrain.get_world_size(), expected.detach())
        for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), other.grad, msg=lambda text, at=name: f"{at}: {text}")
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, whole)]
        torch.testing.assert_close(full(norms[0]), norms[1])
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(full(parameter.data), other.data, msg=lambda text, at=name: f"{at}: {text}")


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    data = mesh["dp", "ep"]._flatten("fsdp")
    for block in model.model.layers:
        fully_shard(block, mesh=data, **options)
    return fully_shard(model, mesh=data, **options)


def check_sharded(models: list[nn.Module], wholes: list[nn.Module], shape: tuple[int, int]) -> None:
    rank = disttrain.get_rank()
    mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    shard_experts(models[rank], mesh["ep"])
    assert_trains_alike(sharded(models[rank], mesh), wholes[rank], (rank, 4))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("mixtral", (1, 4)), ("qwen3_moe", (2, 2)), ("deepseek_v3", (2, 2)), ("qwen3_moe", (4, 1))],
    ids=str,
)
def test_sharded_experts_train_like_one_process(name: str, shape: tuple[int, int]) -> None:
    whole = expert_model(name, 5)
    models = [with_our_experts(copy.deepcopy(whole)) for _ in range(4)]
    run_threads(4, check_sharded, models, [copy.deepcopy(whole) for _ in range(4)], shape)


@on_ranks(4)
def test_sharded_experts_train_over_gloo() -> None:
    whole = expert_model("mixtral", 5)
    check_sharded([with_our_experts(copy.deepcopy(whole))] * 4, [whole] * 4, (2, 2))


@on_ranks(3)
def test_experts_over_three_ranks() -> None:
    mesh = disttrain.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "ep"))
    whole = expert_model("qwen3_moe", 4)
    model = with_our_experts(copy.deepcopy(whole))
    shard_experts(model, mesh["ep"])
    sharded(model, mesh)
    # The last rank has none of the four.
    assert model.model.layers[0].mlp.experts.down_proj.to_local().numel() == (0 if disttrain.get_rank() == 2 else 256)
    tokens = sentences(0, num=6)
    loss_of(model, tokens.chunk(3)[disttrain.get_rank()]).backward()
    loss_of(whole, tokens).backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad)


def reentrant(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


def not_reentrant(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def compiled(model: nn.Module) -> None:
    compile_blocks(model, LAYERS, fullgraph=False, backend="aot_eager")


def compiled_whole(model: nn.Module) -> None:
    """In one graph for each block, without ranks to send to."""
    compile_blocks(model, LAYERS, backend="aot_eager")


def check_changed(
    models: list[nn.Module], wholes: list[nn.Module], shape: tuple[int, int], change: Callable[[nn.Module], None]
) -> None:
    rank = disttrain.get_rank()
    model, whole = models[rank], wholes[rank]
    mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    use_experts(model, report=lambda _: None)
    shard_experts(model, mesh["ep"])
    change(model)
    sharded(model, mesh)
    batch = sentences(0)
    loss_of(model, batch.chunk(mesh.size())[rank]).backward()
    loss_of(whole, batch).backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo hides it, from one thread at a time.
@pytest.mark.parametrize(
    ("change", "shape"),
    [(reentrant, (2, 2)), (not_reentrant, (2, 2)), (compiled, (1, 2)), (compiled_whole, (1, 1))],
)
def test_checkpoints_and_graphs_of_blocks_with_experts(change: Any, shape: tuple[int, int]) -> None:
    whole = expert_model("qwen3_moe", 5).train()
    num_ranks = shape[0] * shape[1]
    copies = ([copy.deepcopy(whole) for _ in range(num_ranks)] for _ in range(2))
    run_threads(num_ranks, check_changed, *copies, shape, change)


@pytest.mark.parametrize("is_compiled_first", [False, True])
def test_whole_graphs_of_divided_experts_are_refused_on_all_ranks(is_compiled_first: bool) -> None:
    whole = expert_model("qwen3_moe", 5)

    def on_rank() -> None:
        model = copy.deepcopy(whole)
        mesh = disttrain.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        use_experts(model, report=lambda _: None)
        if is_compiled_first:
            compile_blocks(model, LAYERS, backend="eager")
        shard_experts(model, mesh["ep"])
        use = partial(loss_of, model, sentences(0)) if is_compiled_first else partial(compile_blocks, model, LAYERS)
        with pytest.raises(CompileError, match=r"mlp\.experts: experts' rows go to .*fullgraph=False"):
            use()

    run_threads(2, on_rank)


def trained_and_saved(models: list[nn.Module], path: str) -> dict[str, torch.Tensor]:
    model = prepared(models, (1, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loss_of(model, sentences(disttrain.get_rank())).backward()
    optimizer.step()
    checkpoint.save(states_of(model, optimizer), path)
    return {name: full(value).clone() for name, value in values_of(model, optimizer)}


def prepared(models: list[nn.Module], shape: tuple[int, int]) -> nn.Module:
    model = models[disttrain.get_rank()]
    mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    use_experts(model, report=lambda _: None)
    shard_experts(model, mesh["ep"])
    return sharded(model, mesh)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = checkpoint.get_state_dict(model, optimizer)
    return {"model": states[0], "optimizer": states[1]}


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    moments = [
        (f"{name}.{kind}", optimizer.state[parameter][kind])
        for name, parameter in model.named_parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    ]
    return [*model.state_dict().items(), *moments]


def check_loaded(models: list[nn.Module], shape: tuple[int, int], path: str, expected: dict[str, torch.Tensor]) -> None:
    model = prepared(models, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    states = states_of(model, optimizer)
    checkpoint.load(states, path)
    checkpoint.set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    for name, value in values_of(model, optimizer):
        assert torch.equal(full(value), expected[name]), name


def test_saves_are_loaded_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    expected = run_threads(4, trained_and_saved, [expert_model("qwen3_moe", 5) for _ in range(4)], path)[0]
    for shape in ((1, 1), (1, 2), (2, 2), (1, 3)):
        num_ranks = shape[0] * shape[1]
        models = [expert_model("qwen3_moe", 5) for _ in range(num_ranks)]
        run_threads(num_ranks, check_loaded, models, shape, path, expected)


def test_float8_says_that_it_leaves_experts() -> None:
    lines: list[str] = []
    kernels.use_float8(expert_model("qwen3_moe", 4), report=lines.append)
    assert "left model.layers.0.mlp.experts, model.layers.1.mlp.experts: they hold the weights" in "\n".join(lines)
