"""A rank's own random numbers on its GPU: they come of the common seed, and leave the GPU's own state alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp import own_randomness
from tests.gpu.ranks import NUM_GPU_RANKS


@on_ranks(NUM_GPU_RANKS)
def test_attention_drops_by_numbers_of_the_rank() -> None:
    mesh = disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,), mesh_dim_names=("tp",))
    device = disttrain.current_world().device
    q = torch.linspace(0, 1, 4 * 64 * 32, device=device).view(1, 4, 64, 32)

    def attended(q: torch.Tensor) -> torch.Tensor:
        with own_randomness(mesh):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    found = []
    for is_recomputed in (False, True):
        torch.manual_seed(7)
        given = q.clone().requires_grad_()
        y = checkpoint(attended, given, use_reentrant=False) if is_recomputed else attended(given)
        again = attended(q)
        y.sin().sum().backward()
        found.append((y.detach(), again, given.grad, torch.rand(4, device=device)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    y, again, _, after = found[0]
    assert not torch.equal(y, again)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4, device=device), after)
    of_all = [torch.empty_like(y, memory_format=torch.contiguous_format) for _ in range(NUM_GPU_RANKS)]
    disttrain.all_gather(of_all, y.contiguous())
    assert all(not torch.equal(of_all[0], other) for other in of_all[1:])
    afters = [torch.empty_like(after) for _ in range(NUM_GPU_RANKS)]
    disttrain.all_gather(afters, after)
    assert all(torch.equal(after, other) for other in afters)
