"""Modules on meta, as they are made before they are cut: shapes come out, within autocast of another device or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import disttrain
from disttrain.autocast import is_within_autocast
from disttrain.kernels import Causal, attention, float8_linear, linear_cross_entropy
from disttrain.kernels.norms.modules import KernelLayerNorm, KernelRMSNorm
from disttrain.kernels.rewrite import loss_of_linear
from disttrain.pipelining import split_layers
from disttrain.testing import run_threads
from disttrain.tp import ColwiseParallel, RowwiseParallel, parallelize_module


@pytest.fixture(params=[False, True], ids=["outside", "within"], autouse=True)
def autocast(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param):
        yield


def test_meta_has_no_autocast() -> None:
    assert not is_within_autocast(torch.device("meta"))
    assert is_within_autocast(torch.device("cpu")) == torch.is_autocast_enabled("cpu")


def targets() -> torch.Tensor:
    return torch.empty(3, dtype=torch.int64)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norms": lambda x: KernelLayerNorm(32)(KernelRMSNorm(32)(x)),
    "loss": lambda x: linear_cross_entropy(x, torch.empty(48, 32), targets(), reduction="none"),
    "attention": lambda x: attention(*[x.view(1, 1, 3, 32)] * 3, Causal())[0, 0],
    "float8": lambda x: float8_linear(x, torch.empty(16, 32)),
    "loss of a head": lambda x: loss_of_linear(nn.Linear(32, 48), x, targets(), False, False, reduction="none"),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels(name: str) -> None:
    with torch.device("meta"):
        x = torch.empty(3, 32, requires_grad=True)
        result = CALLS[name](x)
    assert result.is_meta
    assert len(result) == 3
    assert result.dtype == torch.float32
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.is_meta


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_cut_layer(has_bias: bool) -> None:
    def run() -> None:
        mesh = disttrain.init_device_mesh("cpu", (1,))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(32, 16, bias=has_bias), nn.Linear(16, 32, bias=has_bias))
            x = torch.empty(3, 32, requires_grad=True)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        result = model(x)
        assert result.is_meta
        assert result.shape == (3, 32)
        result.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_threads(1, run)


def test_split_layers() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.RMSNorm(16))
        x = torch.empty(3, 32, requires_grad=True)
    assert split_layers(model) == 3
    result = model(x)
    assert result.is_meta
    assert result.shape == (3, 16)
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
