"""Blocks that were written elsewhere, divided among ranks: the values of one process, and saves for any number."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import checkpoint
from disttrain.errors import DisttrainError, ShardingError
from disttrain.experts import pretrained_state_dict, shard_experts, use_experts
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_blocks import BLOCKS, D
from tests.cases.expert_models import made


def block(name: str) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model: nn.Module = BLOCKS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def divided(model: nn.Module, num_ranks: int, exchange: str = "auto") -> nn.Module:
    use_experts(model, report=lambda _: None)
    mesh = disttrain.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))
    return shard_experts(model, mesh["ep"], exchange=exchange)


def check(name: str, counts: Sequence[int], exchange: str = "auto") -> None:
    """Outputs and gradients on this rank, which has so many tokens."""
    rank = disttrain.get_rank()
    alone = block(name).eval()
    model = divided(copy.deepcopy(alone), len(counts), exchange)
    x = torch.randn(sum(counts), D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    shape = (-1, D) if name in ("late_softmax", "biases") else (1, -1, D)
    grad = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    outs, grads = [], []
    for module, part in ((alone, slice(None)), (model, own)):
        given = x[part].reshape(shape).clone().requires_grad_()
        out = module(given * 1)
        out = out[0] if isinstance(out, tuple) else out
        (out * grad[part].view(out.shape)).sum().backward()
        outs.append(out.reshape(-1, D))
        grads.append(given.grad.view(-1, D))
    torch.testing.assert_close(outs[1], outs[0][own])
    torch.testing.assert_close(grads[1], grads[0][own])
    expected = dict(alone.named_parameters())
    for key, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        elif ".experts." not in f".{key}" and "mlp_experts" not in key:
            found = found.clone()
            disttrain.all_reduce(found)
        like = expected[key].grad
        torch.testing.assert_close(found, torch.zeros_like(found) if like is None else like)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *((name, [4, 0, 6]) for name in BLOCKS),
        *((name, counts) for name in ("sorted_rows", "list_with_forward") for counts in ([5], [5, 3], [3, 2, 1, 4])),
    ],
    ids=str,
)
def test_values_are_those_of_one_process(name: str, counts: list[int]) -> None:
    run_threads(len(counts), check, name, counts)


def check_switched(num_ranks: int) -> None:
    """Experts that are frozen when they are divided, and trained later, with everything else frozen: then the other way
    round. One rank has no expert."""
    alone = block("list_with_forward").requires_grad_(False)
    model = divided(copy.deepcopy(alone), num_ranks)
    x = torch.randn(num_ranks, 3, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for are_trained in (True, False, True):
        for module in (alone, model):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(("experts" in name) == are_trained)
                parameter.grad = None
        alone(x.view(1, -1, D)).sum().backward()
        model(x[disttrain.get_rank()][None]).sum().backward()
        expected = dict(alone.named_parameters())
        for name, parameter in model.named_parameters():
            found, like = parameter.grad, expected[name].grad
            if found is not None and not are_trained:
                disttrain.all_reduce(found)
            if like is None:
                assert found is None or not found.any()
            else:
                torch.testing.assert_close(found, like)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_trained_may_change(num_ranks: int) -> None:
    run_threads(num_ranks, check_switched, num_ranks)


@on_ranks(3)
def test_values_over_gloo() -> None:
    check("shared", [4, 0, 6], "padded")
    check("list_with_forward", [2, 5, 1])
    check("sorted_rows", [2, 5, 1])


def check_copy(name: str) -> None:
    torch.manual_seed(disttrain.get_rank())
    model = divided(block(name).eval(), disttrain.get_world_size())
    x = torch.randn(3, D, dtype=torch.float64)
    x = x if name in ("late_softmax", "biases") else x[None]
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    with pytest.raises(DisttrainError, match=r"pickle: .* means nothing to another process"):
        pickle.dumps(model)


@pytest.mark.parametrize("name", ["sorted_rows", "list_with_forward"])
def test_divided_experts_are_copied_and_not_pickled(name: str) -> None:
    run_threads(2, check_copy, name)


def trained(name: str, num_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A divided block, and its optimizer after a step with gradients that tell one parameter from another."""
    model = divided(block(name), num_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    return model, optimizer


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a flat state dict, as one process has them."""
    full = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            full[key] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def save_it(name: str, folder: Path) -> None:
    model, optimizer = trained(name, disttrain.get_world_size())
    checkpoint.save(checkpoint.training_state(model, optimizer), folder)


def load_it(name: str, folder: Path) -> None:
    """Every tensor of the model and of its optimizer is that of one process that trained alone."""
    num_ranks = disttrain.get_world_size()
    alone = block(name)
    optimizer_alone = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for parameter in alone.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer_alone.step()
    model = divided(block(name), num_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = checkpoint.training_state(model, optimizer)
    checkpoint.load(state, folder)
    checkpoint.set_training_state(model, optimizer, state)
    expected = dict(alone.named_parameters())
    for key, value in whole(dict(model.named_parameters())).items():
        assert torch.equal(value, expected[key]), key
    names = {parameter: key for key, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        like = optimizer_alone.state[expected[names[parameter]]]
        for key, value in whole(values).items():
            assert torch.equal(value, like[key]), (names[parameter], key)


@pytest.mark.parametrize("name", ["list_with_forward", "sorted_rows"])
def test_saves_of_four_ranks_are_loaded_by_any_number(name: str, tmp_path: Path) -> None:
    run_threads(4, save_it, name, tmp_path / "save")
    for num_ranks in (1, 2, 3, 8):
        run_threads(num_ranks, load_it, name, tmp_path / "save")


def read_pretrained(name: str, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    model = made(name).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model = divided(model, disttrain.get_world_size())
    checkpoint.load(pretrained_state_dict(model), storage_reader=checkpoint.HuggingFaceStorageReader(folder))
    for key, value in whole(model.state_dict()).items():
        assert torch.equal(value, expected[key]), key


def write_pretrained(name: str, folder: Path) -> None:
    model = divided(made(name).float(), disttrain.get_world_size())
    checkpoint.save(pretrained_state_dict(model), storage_writer=checkpoint.HuggingFaceStorageWriter(folder))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_files_of_transformers_in_and_out(name: str, tmp_path: Path) -> None:
    import transformers  # here, since it takes seconds

    model = made(name).float()
    model.save_pretrained(tmp_path / "theirs")
    expected = {key: value.detach() for key, value in model.state_dict().items()}
    run_threads(3, read_pretrained, name, tmp_path / "theirs", expected)
    run_threads(2, write_pretrained, name, tmp_path / "ours")
    model.config.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for key, value in again.state_dict().items():
        assert torch.equal(value, expected[key]), key


def train_sharded(name: str, shape: tuple[int, int]) -> None:
    """A list of experts under fully_shard over both axes: parameters after steps are one process's."""
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    mesh = disttrain.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    alone = block(name)
    model = copy.deepcopy(alone)
    use_experts(model, report=lambda _: None)
    shard_experts(model, mesh["ep"])
    fully_shard(model, mesh=mesh["dp", "ep"]._flatten("fsdp"))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for step in range(2):
        x = torch.randn(num_ranks, 5, D, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        losses = [each(part * 1).square().mean() for each, part in ((alone, x), (model, x[rank : rank + 1]))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    expected = dict(alone.named_parameters())
    for key, value in whole(dict(model.named_parameters())).items():
        torch.testing.assert_close(value, expected[key], msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (2, 1)], ids=str)
def test_lists_under_fully_shard(shape: tuple[int, int]) -> None:
    run_threads(shape[0] * shape[1], train_sharded, "list_with_forward", shape)


def load_whole() -> None:
    alone = block("router_apart")
    model = divided(block("router_apart"), 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(alone.state_dict())
    expected = alone.state_dict()
    state = model.state_dict()
    rank = disttrain.get_rank()
    own = [key for key in expected if not key.startswith("experts.") or int(key.split(".")[1]) // 2 == rank]
    assert list(state) == own
    assert all(torch.equal(value, expected[key]) for key, value in state.items())
    with pytest.raises(RuntimeError, match=r"Missing key.*gate"):
        model.load_state_dict({key: value for key, value in expected.items() if "gate" not in key})
    absent = model.experts[(2 * rank + 2) % 6 if rank < 3 else 0]
    with pytest.raises(ShardingError, match=r"expert \d is on another rank"):
        absent(torch.ones(1, D))
    with pytest.raises(ShardingError, match="divided already"):
        shard_experts(model, disttrain.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))["ep"])


def test_a_divided_list_takes_its_own_of_a_whole_state_dict() -> None:
    """Six experts on four ranks: the last has none."""
    run_threads(4, load_whole)


def test_experts_that_are_trained_on_one_rank_alone() -> None:
    """Tokens without a gradient, and a rank whose experts are frozen: it takes part in the others' backward."""

    def body() -> None:
        rank = disttrain.get_rank()
        model = block("loop_over_hits").eval()
        for expert in [*model.experts][: -(-len(model.experts) // 2)]:
            expert.requires_grad_(False)
        model = divided(model, 2)
        x = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert any(parameter.grad is not None for parameter in model.experts.parameters()) == (rank == 1)

    run_threads(2, body)
