"""fully_shard's memory between streams: whoever is slow, nobody writes to what another stream still reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.errors import ShardingError
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from disttrain.fsdp2.transfers.comm import Comm
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS

CYCLES = 20_000_000
"""About 10 ms: longer than the host needs for what it queues meanwhile."""

DIM = 512


class Slow(torch.autograd.Function):
    """Hands on its input; what computes waits, forward and backward, while the host goes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return grad.clone()


class Block(nn.Module):
    """Two linears after a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.is_slow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Slow.apply(x) if self.is_slow else x
        return x + self.down(self.up(y).relu())


def pair(**options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    with torch.device(disttrain.current_world().device):
        reference = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(DIM, DIM))
    model = copy.deepcopy(reference)
    for block in model[:4]:
        fully_shard(block, **options)
    return fully_shard(model, **options), reference


def batch(step: int) -> torch.Tensor:
    x = torch.randn(8 * disttrain.get_world_size(), DIM, generator=torch.Generator().manual_seed(step))
    return x.to(disttrain.current_world().device)


def own_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step).chunk(disttrain.get_world_size())[disttrain.get_rank()]).square().mean()


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        found = p.grad.to(disttrain.current_world().device).full_tensor()
        torch.testing.assert_close(found, q.grad, rtol=1e-3, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}")


def comm_of(model: nn.Module) -> Comm:
    comm: Comm = model.__dict__["_disttrain_shard_state"].context.comm
    return comm


@contextmanager
def slow(model: nn.Module, who: str) -> Iterator[None]:
    """Let one of the streams be late."""
    if who == "compute":
        for block in model[:4]:
            block.is_slow = True
    else:
        with getattr(comm_of(model).streams, who)():
            torch.cuda._sleep(10 * CYCLES)
    yield
    for block in model[:4]:
        block.is_slow = False


OPTIONS: dict[str, Callable[[], dict[str, object]]] = {
    "one axis": dict,
    "kept whole": lambda: {"reshard_after_forward": False},
    "kept by neighbours": lambda: {"reshard_after_forward": 1},
    "copies": lambda: {"mesh": disttrain.init_device_mesh("cuda", (disttrain.get_world_size(), 1))},
    "host": lambda: {"offload_policy": CPUOffloadPolicy()},
    "cast": lambda: {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64)},
}


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("who", ["compute", "gathering", "reducing", "replicating"])
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_training_is_right_whichever_stream_is_late(kind: str, who: str) -> None:
    model, reference = pair(**OPTIONS[kind]())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    own_loss(model, 0).backward()
    model.zero_grad()
    for step in range(3):
        with slow(model, who):
            for micro in range(2):
                # Accumulating with communication; on the host, sums must wait for what is on its way.
                model.set_is_last_backward(micro == 1)
                own_loss(model, 2 * step + micro).backward()
                reference(batch(2 * step + micro)).square().mean().backward()
            assert_same_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("waits_for_optimizer", [False, True])
def test_memory_that_is_still_read_is_not_gathered_into(waits_for_optimizer: bool) -> None:
    device = disttrain.current_world().device
    linear = nn.Linear(DIM, 4 * DIM, bias=False, device=device)
    expected = linear.weight.detach().clone()
    model = fully_shard(linear)
    with torch.no_grad():
        model(torch.ones(1, DIM, device=device))
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.weight.data_ptr()))
    was_reused, held = False, []
    for _ in range(8):
        torch.cuda.synchronize()
        stepped = torch.cuda.Event()
        stepped.record()
        others = torch.full((4 * DIM, DIM), 1.0, device=device)
        place = others.data_ptr()
        torch.cuda._sleep(10 * CYCLES)
        held.append(others.clone())
        del others
        if waits_for_optimizer:
            model.set_post_optim_event(stepped)
        with torch.no_grad():
            out = model(torch.eye(DIM, device=device))
        assert bool((held[-1] == 1.0).all())
        torch.testing.assert_close(out, expected.T)
        was_reused = was_reused or seen[-1] == place
    # Otherwise this would have shown nothing.
    assert was_reused


@on_ranks(NUM_GPU_RANKS)
def test_what_neighbours_keep_is_held_until_it_has_been_gathered() -> None:
    device = disttrain.current_world().device
    model, reference = pair(reshard_after_forward=1)
    own_loss(model, 0)
    block = model[0]
    with comm_of(model).streams.gathering():
        torch.cuda._sleep(10 * CYCLES)
    handle = block.unshard(async_op=True)
    junk = [torch.full((4 * DIM * DIM + 3 * DIM,), torch.nan, device=device) for _ in range(8)]
    handle.wait()
    for p, q in zip(block.parameters(), reference[0].parameters(), strict=True):
        torch.testing.assert_close(p, q)
    block.reshard()
    assert len(junk) == 8


@on_ranks(NUM_GPU_RANKS)
def test_shards_on_the_host_may_be_written_after_an_evaluation() -> None:
    model, reference = pair(offload_policy=CPUOffloadPolicy())
    own_loss(model, 0).backward()
    model.zero_grad()
    with torch.no_grad():
        with comm_of(model).streams.gathering():
            torch.cuda._sleep(10 * CYCLES)
        found = model(batch(1))
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        torch.testing.assert_close(found, reference(batch(1)), rtol=1e-3, atol=1e-5)


@on_ranks(NUM_GPU_RANKS)
def test_parameters_on_the_wrong_device_are_refused() -> None:
    device = disttrain.current_world().device
    mesh = disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),))
    with pytest.raises(ShardingError, match=r"(?s)is on cuda:\d, and this rank computes on cpu.*init_device_mesh"):
        fully_shard(nn.Linear(2, 2, device=device), mesh=mesh)
    model = fully_shard(nn.Linear(2, 2, device=device)).cpu()
    with pytest.raises(ShardingError, match=r"(?s)is on cpu, and this rank computes on cuda.*model.to\('cuda"):
        model(torch.ones(1, 2, device=device))
    model.to(device)(torch.ones(1, 2, device=device)).sum().backward()
