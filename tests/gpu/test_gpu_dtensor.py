"""DTensor on GPUs: what has kernels of its own there, judged by one process on the same GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import disttrain
from disttrain.dtensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS

PLACEMENTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def mesh_of_all() -> disttrain.DeviceMesh:
    return disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every rank."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(disttrain.current_world().device)


def agree(compute: Callable[..., torch.Tensor], wholes: list[torch.Tensor], placements: list[Placement]) -> None:
    """Compare values and gradients of the parts with those of whole tensors."""
    mesh = mesh_of_all()
    alone = [whole.clone().requires_grad_(whole.is_floating_point()) for whole in wholes]
    cut: list[Any] = [
        distribute_tensor(whole, mesh, [placement]).detach().requires_grad_(whole.is_floating_point())
        for whole, placement in zip(wholes, placements, strict=True)
    ]
    expected, found = compute(*alone), compute(*cut)
    tolerance = CLOSE[expected.dtype]
    torch.testing.assert_close(found.full_tensor(), expected, atol=tolerance, rtol=tolerance)  # type: ignore[attr-defined]
    weights = normal(*expected.shape, seed=7, dtype=expected.dtype)
    (expected * weights).sum().backward()
    (found * distribute_tensor(weights, mesh, [Replicate()])).sum().backward()
    for one, other in zip(alone, cut, strict=True):
        if one.requires_grad:
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, atol=4 * tolerance, rtol=4 * tolerance)


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_cut_batch_and_heads(backend: str, dim: int, is_causal: bool) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.__members__[backend]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    wholes = [normal(4, 8, 64, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    agree(attend, wholes, [Shard(dim)] * 3)


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_layers_with_kernels_of_their_own(name: str) -> None:
    placement = PLACEMENTS[name]
    image, weight, scale = normal(4, 6, 8, 8), normal(6, 6, 3, 3, seed=1), normal(6, seed=2)
    whole = Replicate()
    agree(lambda x, w: F.conv2d(x, w, padding=1), [image, weight], [placement, whole])
    agree(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [image, scale, scale],
        [placement, whole, whole],
    )
    agree(lambda x: F.layer_norm(x, (8, 8)), [image], [placement])
    agree(lambda x: F.rms_norm(x, (8,)), [image], [placement])
    agree(lambda x: F.max_pool2d(x, 2), [image], [placement])
    agree(lambda x: x.softmax(1), [image], [placement])
    logits, classes = normal(6, 10), torch.arange(6, device=image.device)
    agree(F.cross_entropy, [logits, classes], [placement, Shard(0) if placement == Shard(0) else whole])
    tokens = torch.arange(6, device=image.device).view(2, 3)
    agree(F.embedding, [tokens, normal(10, 4)], [Shard(0), placement])


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_random_numbers_are_those_of_one_process(name: str) -> None:
    placement = PLACEMENTS[name]
    mesh = mesh_of_all()
    ones = torch.ones(6, 5, device=disttrain.current_world().device)
    cut = distribute_tensor(ones, mesh, [placement])
    draws: list[Callable[[Any], Any]] = [
        torch.rand_like,
        torch.randn_like,
        lambda x: F.dropout(x, 0.5),
        lambda x: x.clone().uniform_(-1, 1),
        lambda x: x.clone().normal_(),
        lambda x: torch.bernoulli(x * 0.5),
    ]
    torch.manual_seed(3)
    expected = [draw(ones) for draw in draws]
    torch.manual_seed(3)
    for draw, wanted in zip(draws, expected, strict=True):
        torch.testing.assert_close(draw(cut).full_tensor(), wanted, rtol=0, atol=0)


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_model_trains_as_in_one_process(kind: str) -> None:
    device = disttrain.current_world().device
    alone = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5)).to(device)
    with torch.no_grad():
        for seed, parameter in enumerate(alone.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))

    def cut(name: str, module: nn.Module, mesh: disttrain.DeviceMesh) -> None:
        placements = {"0": (Shard(0), Shard(0)), "2": (Shard(1), Replicate())}
        for own, placement in zip(("weight", "bias"), placements.get(name, ()), strict=False):
            whole = distribute_tensor(getattr(module, own).detach(), mesh, [placement])
            module.register_parameter(own, nn.Parameter(whole))

    together = distribute_module(copy.deepcopy(alone), mesh_of_all(), cut)
    models = (alone, together)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, **{kind: True}) for model in models]  # type: ignore[arg-type]
    for step in range(4):
        x = normal(8, 12, seed=step)
        rows = distribute_tensor(x, mesh_of_all(), [Replicate()])
        norms = []
        for model, batch, optimizer in zip(models, (x, rows), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
        assert isinstance(norms[1], DTensor)
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        assert isinstance(other, DTensor)
        torch.testing.assert_close(other.full_tensor(), one)
