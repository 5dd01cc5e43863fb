"""A ring whose keys go by copy engines: bit for bit what it is by NCCL, eager, deterministic and recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttrain
from disttrain.compiling import capture_step
from disttrain.kernels import Causal, SlidingWindow, attention
from disttrain.kernels.attention.context.parts import contiguous, mirrored
from disttrain.kernels.attention.context.peers import PeerSlots
from disttrain.mesh import DeviceMesh
from disttrain.process_group import ProcessGroup
from disttrain.process_group._c10d import SharedMemory
from disttrain.process_group.peers.memory import share_memory
from disttrain.store import PrefixStore
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS

LENGTH = 2048
RULES = {"causal": Causal(), "window": Causal() & SlidingWindow(700)}


class Memories:
    """Memory between the ranks, also of those that share a GPU; none where messages are to go by NCCL."""

    def __init__(self, *, has_any: bool) -> None:
        self._has_any = has_any
        self.num_made = 0

    def make(self, group: ProcessGroup, device: torch.device, num_bytes: int) -> Any:
        self.num_made += 1
        if not self._has_any:
            return None
        if group.group_size <= torch.cuda.device_count():
            return share_memory(group, device, num_bytes)
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        name = f"context/{group.group_name}/{self.num_made}"
        store = PrefixStore(name, group.world.store)
        return SharedMemory(name, group.group_rank, group.group_size, store, num_bytes, device)


def axis_by(memories: Memories) -> DeviceMesh:
    mesh = disttrain.init_device_mesh("cuda", (disttrain.get_world_size(),), mesh_dim_names=("cp",))
    group = mesh.get_group()
    group.peer_slots = PeerSlots(group, torch.device("cuda", torch.cuda.current_device()), memories.make)
    return mesh


def drawn_part(length: int, name: str, seed: int) -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    """This rank's query, key and value in bf16, and the gradient of the result."""
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    parts = (mirrored if name == "causal" else contiguous)(length, size)
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(1, heads, length, 64, generator=generator) for heads in (8, 2, 2, 8)]
    *own, weight = (parts.take(tensor, rank, 2).to("cuda", torch.bfloat16).contiguous() for tensor in whole)
    return parts, [tensor.requires_grad_() for tensor in own], weight


def run(mesh: DeviceMesh, length: int, name: str, seed: int) -> list[torch.Tensor]:
    parts, own, weight = drawn_part(length, name, seed)
    result = attention(*own, RULES[name], axis=mesh, parts=parts, way="ring")
    return [result.detach(), *torch.autograd.grad(result, own, weight)]


@on_ranks(NUM_GPU_RANKS, timeout_s=200)
@pytest.mark.skipif(NUM_GPU_RANKS < 2, reason="needs two ranks")
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_values_are_those_of_messages(is_deterministic: bool) -> None:
    rank = disttrain.get_rank()
    results = []
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for has_any in (False, True):
            memories = Memories(has_any=has_any)
            mesh = axis_by(memories)
            values = []
            # The second length makes memory grow.
            for seed, length in enumerate((LENGTH, 16 * LENGTH, LENGTH + 2, LENGTH)):
                for name in RULES:
                    for turn in range(4):
                        # Each rank comes late in turn.
                        if turn % disttrain.get_world_size() == rank:
                            torch.cuda._sleep(2_000_000)
                        values += run(mesh, length, name, seed)
            results.append(values)
            assert memories.num_made == (2 if has_any else 1)
    finally:
        torch.use_deterministic_algorithms(False)
    for value, expected in zip(*results, strict=True):
        if is_deterministic:
            assert torch.equal(value, expected)
        else:
            # Atomic additions of a backward kernel come in any order.
            torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)


def layers(mesh: DeviceMesh, num_layers: int) -> tuple[Callable[..., tuple[torch.Tensor, ...]], list[torch.Tensor]]:
    """A step of so many layers with the same keys, forward and backward, and its inputs."""
    parts, own, weight = drawn_part(LENGTH, "causal", num_layers)

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        hidden = inputs[0]
        for _ in range(num_layers):
            hidden = attention(hidden, inputs[1], inputs[2], Causal(), axis=mesh, parts=parts, way="ring")
        return hidden.detach(), *torch.autograd.grad(hidden, inputs, weight)

    return step, own


@on_ranks(NUM_GPU_RANKS, timeout_s=200)
@pytest.mark.skipif(NUM_GPU_RANKS < 2, reason="needs two ranks")
def test_recorded_steps() -> None:
    """Odd and even numbers of exchanges, replayed behind each other, and steps as they are in between."""
    mesh = axis_by(Memories(has_any=True))
    for num_layers in (1, 2):
        step, own = layers(mesh, num_layers)
        captured = capture_step(step)
        for turn in range(12):
            if turn % disttrain.get_world_size() == disttrain.get_rank():
                torch.cuda._sleep(2_000_000)
            scaled = [tensor.detach() * (1 + turn / 8) for tensor in own]
            expected = step(*scaled)
            for value, wish in zip(captured(*scaled), expected, strict=True):
                torch.testing.assert_close(value, wish, rtol=2e-2, atol=2e-2)
        assert captured.num_graphs == 1


@on_ranks(NUM_GPU_RANKS, timeout_s=200)
@pytest.mark.skipif(NUM_GPU_RANKS < 2, reason="needs two ranks")
def test_recorded_steps_are_replayed_after_memory_has_grown() -> None:
    mesh = axis_by(Memories(has_any=True))
    step, own = layers(mesh, 2)
    captured, tensors = capture_step(step), [tensor.detach() for tensor in own]
    for _ in range(3):
        captured(*tensors)
    run(mesh, 16 * LENGTH, "causal", 0)
    # What was freed would be taken for this.
    others = [torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for value, wish in zip(captured(*tensors), step(*tensors), strict=True):
        torch.testing.assert_close(value, wish, rtol=2e-2, atol=2e-2)
    assert all(bool((other == 255).all()) for other in others)
    assert captured.num_graphs == 1
