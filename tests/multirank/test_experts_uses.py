"""What users do with models whose experts are divided: they generate, scale gradients, tie weights, add to experts.

Each is judged by one process of the same modules in fp64. Of three ranks the last has none of four experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.experts import GradScaler, shard_experts, use_experts
from disttrain.fsdp2 import fully_shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_blocks import BLOCKS, D
from tests.cases.expert_layers import HIDDEN
from tests.cases.expert_mixtures import ep_mesh, mixture
from tests.cases.expert_transformers import expert_model, loss_of, sentences

NUM_RANKS = 3


def run(check: Callable[..., None], whole: nn.Module, *arguments: Any) -> None:
    """`check` on each rank, with a model that is to be divided and the whole."""
    models, wholes = ([copy.deepcopy(whole) for _ in range(NUM_RANKS)] for _ in range(2))
    run_threads(NUM_RANKS, lambda: check(*(each[disttrain.get_rank()] for each in (models, wholes)), *arguments))


def divided(model: nn.Module) -> DeviceMesh:
    mesh = disttrain.init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "ep"))
    use_experts(model, report=lambda _: None)
    shard_experts(model, mesh["ep"])
    return mesh["dp", "ep"]._flatten("shards")


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def listed() -> nn.Module:
    """A block with experts in a ModuleList."""
    torch.manual_seed(0)
    block: nn.Module = BLOCKS["list_with_forward"]().double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block


def loss_of_block(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = block(x)
    return (out[0] if isinstance(out, tuple) else out).square().mean()


def check_generation(model: nn.Module, whole: nn.Module) -> None:
    divided(model)
    prompt = sentences(disttrain.get_rank(), 2, 4)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    answers = [module.eval().generate(prompt, **options) for module in (model, whole)]
    assert torch.equal(*answers)


def test_generation_with_a_cache() -> None:
    run(check_generation, expert_model("qwen3_moe", 4))


def check_scaler(model: nn.Module, whole: nn.Module, is_listed: bool, is_plain: bool) -> None:
    """In the second step a gradient of expert 1's is infinite, which one rank has."""
    mesh = divided(model)
    if not is_plain:
        fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    kinds = (GradScaler if is_plain else torch.amp.GradScaler, torch.amp.GradScaler)
    scalers = [kind("cpu", init_scale=4.0, growth_interval=2) for kind in kinds]
    own = disttrain.get_rank()
    for step in range(3):
        batch = sentences(step, 6)
        if is_listed:
            batch = torch.randn(6, 5, D, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for module, data, scaler, optimizer in zip(
            (model, whole), (batch.chunk(NUM_RANKS)[own], batch), scalers, optimizers, strict=True
        ):
            scaler.scale((loss_of_block if is_listed else loss_of)(module, data)).backward()
            if is_plain and module is model:
                average(model)
            if step == 1:
                spoil(module)
            if is_plain:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0, 2.0, 2.0)[step]
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.data), expected[name].data)


def average(model: nn.Module) -> None:
    """What a data-parallel wrapper does; experts have the sum already."""
    for name, parameter in model.named_parameters():
        if "experts." in name:
            parameter.grad /= NUM_RANKS
        else:
            disttrain.all_reduce(parameter.grad)
            parameter.grad /= NUM_RANKS


def spoil(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if "experts.1." in name or (name.endswith("experts.down_proj") and disttrain.get_rank() == 0):
            local.fill_(float("inf"))
        elif name.endswith("experts.down_proj") and not isinstance(grad, DTensor):
            local[0] = float("inf")


@pytest.mark.parametrize(("is_listed", "is_plain"), [(False, False), (True, False), (True, True)])
def test_all_ranks_skip_the_step_for_one_experts_gradient(is_listed: bool, is_plain: bool) -> None:
    run(check_scaler, listed() if is_listed else expert_model("qwen3_moe", 4), is_listed, is_plain)


def check_tied(model: nn.Module, whole: nn.Module) -> None:
    for each in (model, whole):
        first, second = (block.mlp.experts for block in each.model.layers)
        second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    fully_shard(model, mesh=divided(model))
    tokens = sentences(0, 6)
    loss_of(model, tokens.chunk(NUM_RANKS)[disttrain.get_rank()]).backward()
    loss_of(whole, tokens).backward()
    for (name, parameter), (other_name, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(full(parameter.grad), other.grad)


def test_layers_that_share_weights_still_do() -> None:
    run(check_tied, expert_model("qwen3_moe", 4))


def check_added(model: nn.Module, whole: nn.Module) -> None:
    divided(model)
    for module in (model, whole):
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and "experts." in name:
                layer.weight.requires_grad_(False)
                generator = torch.Generator().manual_seed(sum(name.encode()))
                for factor, shape in (("a", (2, layer.in_features)), ("b", (layer.out_features, 2))):
                    value = torch.randn(shape, generator=generator, dtype=torch.float64)
                    layer.register_parameter(factor, nn.Parameter(value))
                layer.register_forward_hook(lambda at, given, out: out + given[0] @ at.a.T @ at.b.T)
    x = torch.randn(NUM_RANKS, 3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss_of_block(model, x[disttrain.get_rank()][None]).backward()
    loss_of_block(whole, x).backward()
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if "experts." in name and parameter.requires_grad:
            torch.testing.assert_close(parameter.grad / NUM_RANKS, expected[name].grad)


def test_what_hooks_add_to_experts() -> None:
    run(check_added, listed())


def check_changed(model: nn.Module, whole: nn.Module) -> None:
    divided(model)
    for module in (model, whole):
        module.model.layers[0].mlp.experts.act_fn = nn.Tanh()
    with pytest.raises(ShardingError, match=r"attributes of Qwen3MoeExperts are others .*\[rank \d"):
        model(sentences(0))


def test_an_activation_that_is_replaced_after_experts_were_divided() -> None:
    run(check_changed, expert_model("qwen3_moe", 4))


class Dropping(nn.Module):
    """Experts between layers of dropout, by which each rank draws its own."""

    def __init__(self, is_reentrant: bool | None) -> None:
        super().__init__()
        self.mixture, self.dropout, self.is_reentrant = mixture(), nn.Dropout(0.4), is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(x: torch.Tensor) -> torch.Tensor:
            return x + self.dropout(self.mixture(self.dropout(x)))

        return block(x) if self.is_reentrant is None else checkpoint(block, x, use_reentrant=self.is_reentrant)


@on_ranks(2)
def test_dropout_around_experts_is_drawn_again_in_a_checkpoint() -> None:
    found = []
    for is_reentrant in (None, False, True):
        model = Dropping(is_reentrant)
        shard_experts(model, ep_mesh())
        torch.manual_seed(7 + disttrain.get_rank())
        x = torch.randn(9, HIDDEN, dtype=torch.float64, requires_grad=True)
        out = model(model(x))
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(full(parameter.grad) for parameter in model.parameters())])
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
