"""What `estimate` says is what torch's allocator hands out on a GPU, activations of two tokens included."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import Shard
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, estimate, fully_shard
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS
from tests.multirank import models

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
TOLERANCE = 0.05
KEPT_BYTES = 2**20
"""By what has run before: libraries keep some memory for shapes that they have not seen."""


def cut_last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.ndim > 1 else None


OPTIONS = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "bf16, reduced in fp32": {"mp_policy": BF16},
    "whole until backward": {"reshard_after_forward": False},
    "cut along the last dim": {"shard_placement_fn": cut_last_dim},
    "offloaded": {"offload_policy": CPUOffloadPolicy(), "mp_policy": BF16},
}


def allocated() -> int:
    # The models of earlier tests are circles of modules and hooks.
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def warm_up(device: torch.device) -> None:
    """Let the libraries of matrix products take what they keep."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(2, 64, device=device, dtype=dtype)).sum().backward()


def check(mesh: disttrain.DeviceMesh, device: torch.device, *, is_tied: bool, **options: object) -> None:
    warm_up(device)
    tokens = torch.tensor([[1, 2]], device=device)
    before = allocated()
    with torch.device("meta"):
        # Sizes that do not divide; the embedding is large enough to be reduced apart from the rest of the root.
        model = models.TinyModel(vocab=9001, dim=1027, hidden=4099, num_blocks=6)
        if not is_tied:
            model.head = nn.Linear(1027, 9001, bias=False)
    said = estimate(model, mesh, blocks=model.blocks, **options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not options.get("offload_policy"))

    def step() -> None:
        model(tokens).float().logsumexp(-1).mean().backward()

    for _ in range(3):
        step()
        optimizer.step()
        optimizer.zero_grad()
    resting = allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    assert said.peak.num_bytes == pytest.approx(peak - resting, rel=TOLERANCE), (peak - resting, said)
    # The first rank has the most, if only by padding.
    assert resting - before <= said.resting_bytes * (1 + TOLERANCE) + KEPT_BYTES
    assert peak - before == pytest.approx(said.peak_bytes, rel=TOLERANCE), said


def in_a_world_without_peers(run: Callable[[torch.device], None]) -> None:
    """On one GPU, with the sizes that eight would see."""
    device = torch.device("cuda", 0)
    with entered_world(World(HashStore(), 0, 8, backend="fake", timeout_s=1.0, device=device)):
        run(device)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_eight_ranks_that_are_not_there(name: str, is_tied: bool) -> None:
    in_a_world_without_peers(
        lambda device: check(disttrain.init_device_mesh("cuda", (8,)), device, is_tied=is_tied, **OPTIONS[name])
    )


@pytest.mark.parametrize("name", ["plain", "bf16, reduced in fp32"])
def test_copies_beside_shards_that_are_not_there(name: str) -> None:
    in_a_world_without_peers(
        lambda device: check(disttrain.init_device_mesh("cuda", (2, 4)), device, is_tied=False, **OPTIONS[name])
    )


def test_parameters_kept_on_pairs_that_are_not_there() -> None:
    in_a_world_without_peers(
        lambda device: check(
            disttrain.init_device_mesh("cuda", (8,)), device, is_tied=False, reshard_after_forward=2, mp_policy=BF16
        )
    )


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("name", ["plain", "bf16, reduced in fp32", "offloaded"])
def test_real_ranks(name: str) -> None:
    device = disttrain.current_world().device
    check(disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,)), device, is_tied=False, **OPTIONS[name])
