"""Experts over ranks with bad input, and ranks that fail: each error is said on all ranks, and nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    MeshError,
    ShapeError,
    ShardingError,
)
from disttrain.experts import Experts, ExpertTensorParallel, MixtureOfExperts, dispatch, shard_experts
from disttrain.experts.exchange import dispatch as dispatching
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.expert_layers import HIDDEN, judge, ours, tokens
from tests.cases.expert_mixtures import Model, ep_mesh, mixture


def _raises(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def _narrow(model: MixtureOfExperts, _: pytest.MonkeyPatch) -> None:
    model.router.linear = nn.Linear(HIDDEN + 1, 5).double()
    model.register_forward_pre_hook(lambda _, args: (torch.randn(3, HIDDEN + 1, dtype=torch.float64),))


BREAKS: dict[str, tuple[Callable[[MixtureOfExperts, pytest.MonkeyPatch], object], str]] = {
    "before the layer": (lambda model, _: model.register_forward_pre_hook(_raises), "division by zero"),
    "before the router": (lambda model, _: model.router.register_forward_pre_hook(_raises), "division by zero"),
    "in the router": (lambda model, patch: patch.setattr(model.router, "k", 9), "k"),
    "after the router": (lambda model, _: model.router.register_forward_hook(_raises), "division by zero"),
    "logits that are no tensor": (
        lambda model, _: model.router.register_forward_hook(lambda *_: ("", None, None)),
        "attribute",
    ),
    "a wrong width": (_narrow, f"x has {HIDDEN + 1} columns, and the experts take {HIDDEN}"),
    "another dtype": (
        lambda model, _: model.register_forward_pre_hook(lambda _, args: (args[0].float(),)),
        "same dtype",
    ),
    "before sizes go": (lambda _, patch: patch.setattr(dispatching, "ordered", _raises), "division by zero"),
    "before rows go": (lambda _, patch: patch.setattr(dispatching, "take_rows", _raises), "division by zero"),
    "within shared experts": (
        lambda model, _: model.shared_experts.register_forward_hook(_raises),
        "division by zero",
    ),
    "within experts": (lambda model, patch: patch.setattr(model.experts, "compute", _raises), "division by zero"),
    "as sums are taken": (lambda _, patch: patch.setattr(dispatching, "combine_rows", _raises), "division by zero"),
}
"""Where a rank raises, and what the others hear."""


@on_ranks(3, timeout_s=120)
@pytest.mark.parametrize("where", list(BREAKS))
def test_nobody_waits_for_a_rank_that_raises(where: str) -> None:
    layer = mixture()
    model = shard_experts(nn.Sequential(layer, nn.Identity()), ep_mesh())
    spoil, text = BREAKS[where]
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    since_s = time.monotonic()
    if disttrain.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            spoil(layer, patch)
            with pytest.raises((ShapeError, ZeroDivisionError, RuntimeError, AttributeError), match=text):
                model(x)
        # The others are told before this rank's processes see it end.
        time.sleep(1)
    else:
        with pytest.raises(CollectiveMismatchError, match=f"rank 1 refused experts: .*{text}"):
            # What is raised once rows have come is heard at the next exchange.
            model(model(x))
    assert time.monotonic() - since_s < 60


@on_ranks(2, timeout_s=8)
def test_a_hook_of_the_whole_model_that_raises_is_heard_of_in_time() -> None:
    model = shard_experts(Model(), ep_mesh())
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    disttrain.barrier()
    since_s = time.monotonic()
    if disttrain.get_rank() == 1:
        model.register_forward_pre_hook(_raises)
        with pytest.raises(ZeroDivisionError):
            model(x)
        # It goes on without the model.
        time.sleep(10)
    else:
        with pytest.raises(CollectiveTimeoutError, match=r"not every rank came within 8 s: rank 1 "):
            model(x)
    assert time.monotonic() - since_s < 60


@on_ranks(2, timeout_s=120)
def test_nobody_waits_in_backward_for_a_rank_whose_forward_has_raised() -> None:
    model = shard_experts(Model(), ep_mesh())
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    disttrain.barrier()
    since_s = time.monotonic()
    if disttrain.get_rank() == 1:
        model.head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        time.sleep(1)
    else:
        loss = model(x).sum()
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 refused experts: .*division by zero"):
            loss.backward()
    assert time.monotonic() - since_s < 60


@on_ranks(2, 3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_raise_for_weights_of_one_that_are_not_finite(bad: float) -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh())
    x, indices, weights = tokens(0, 3, 2, 4)
    if disttrain.get_rank() == 1:
        weights[1, 0] = bad
    with pytest.raises(ShapeError, match="on rank 1 are not all finite"):
        layer(x, indices, weights)
    # The group goes on.
    weights[:] = 1
    assert layer(x, indices, weights).isfinite().all()


@pytest.mark.parametrize("exchange", ["all_to_all", "padded"])
@pytest.mark.parametrize("way", ["cast", "autocast", "shared"])
def test_dtypes_that_differ_between_ranks_are_named_on_all(exchange: str, way: str) -> None:
    def check() -> None:
        is_odd = disttrain.get_rank() == 1
        layer = mixture(shared=way == "shared")
        shard_experts(nn.ModuleDict({"mlp": layer}), ep_mesh(), exchange=exchange)
        layer.to(torch.float32 if is_odd or way == "autocast" else torch.float64)
        x = torch.randn(3, HIDDEN)
        text = "torch.float64 on ranks 0, 2, torch.float32 on rank 1"
        if way == "autocast":
            text = "torch.float32 on ranks 0, 2, torch.float32 within autocast to torch.bfloat16 on rank 1"
        elif not is_odd:
            x = x.double()
        text = rf"unlike dtypes: {text}\. .*\[rank \d, mlp\]"
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_odd and way == "autocast")
        with autocast, pytest.raises(ShapeError, match=text):
            layer(x)

    run_threads(3, check)


@on_ranks(2, 3)
def test_bad_input_raises_alike_on_all_ranks() -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh())
    x, indices, weights = tokens(0, 3, 2, 4)
    for arguments, text in (
        ((x, indices.double(), weights), "indices are torch.float64 of shape"),
        ((x, indices[:2], weights[:2]), "for x of 3 tokens"),
        ((x, indices, weights[:, :1]), r"weights are .* \(3, 1\) for indices of shape \(3, 2\)"),
        ((x[None], indices, weights), r"x is torch.float64 of shape \(1, 3, 12\)"),
        ((x, indices[:, :0], weights[:, :0]), "each token has 0 experts"),
        ((x, indices.repeat(1, 3), weights.repeat(1, 3)), "each token has 6 experts, and there are 4"),
    ):
        with pytest.raises(ShapeError, match=text):
            layer(*arguments)
    assert layer(x, indices, weights).isfinite().all()


def test_meshes_and_modules_that_do_not_fit() -> None:
    def body() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
        layer = ours(judge("mixtral", 4))
        with pytest.raises(MeshError, match=r"has 2 axes\. Give the one axis along which experts lie"):
            shard_experts(layer, mesh)
        with pytest.raises(MeshError, match="tp"):
            shard_experts(layer, mesh["tp"])
        with pytest.raises(MeshError, match="the mesh is None"):
            shard_experts(layer, None)
        with pytest.raises(ShapeError, match="exchange is 'mail'"):
            shard_experts(layer, mesh["dp"], exchange="mail")
        for capacity in (-1, 0, float("nan"), float("inf"), "much"):
            with pytest.raises(ShardingError, match=f"capacity is {capacity!r}"):
                shard_experts(layer, mesh["dp"], capacity=capacity)
            with pytest.raises(ShapeError, match=f"capacity is {capacity!r}"):
                dispatch(*tokens(0, 3, 2, 4)[:2], 4, mesh["dp"], capacity)
        with pytest.raises(ShardingError, match="Linear has no experts"):
            shard_experts(nn.Linear(2, 2), mesh["dp"])
        shard_experts(layer, mesh["dp"])
        with pytest.raises(ShardingError, match=r"is (divided|a DTensor) already"):
            shard_experts(layer, mesh["dp"])

    run_threads(2, body)


REFUSED: dict[str, Callable[[DeviceMesh], object]] = {
    "Linear has no experts": lambda mesh: shard_experts(nn.Linear(2, 2), mesh),
    "capacity is 0": lambda mesh: shard_experts(Model(), mesh, capacity=0),
    "a hidden dim of 7": lambda mesh: ExpertTensorParallel().apply_to(Experts(4, 6, 7), mesh, 0),
}


@on_ranks(2, 3, timeout_s=120)
@pytest.mark.parametrize("text", list(REFUSED))
def test_nobody_waits_for_a_rank_that_refuses_to_divide(text: str) -> None:
    mesh, since_s = ep_mesh(), time.monotonic()
    if disttrain.get_rank() == 1:
        with pytest.raises(ShardingError, match=text):
            REFUSED[text](mesh)
        time.sleep(1)
    else:
        with pytest.raises((CollectiveMismatchError, GroupError), match=f"rank 1 refused experts: .*{text}"):
            shard_experts(Model(), mesh)
    assert time.monotonic() - since_s < 60


@on_ranks(2)
def test_room_that_is_too_small_later() -> None:
    layer = shard_experts(ours(judge("mixtral", 4)), ep_mesh(), exchange="padded")
    layer(*tokens(disttrain.get_rank(), 3, 2, 4))
    with pytest.raises(ShapeError, match="8 rows may go to one rank, and there is room for 6"):
        layer(*tokens(disttrain.get_rank(), 4, 2, 4))
