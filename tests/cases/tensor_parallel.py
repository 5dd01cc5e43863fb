"""Modules for tensor parallel, ways to cut them, and the comparison with the same module in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.tp import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class GatedMLP(nn.Module):
    """Llama's."""

    def __init__(self, dim: int = 6, hidden: int = 10, bias: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Feeding(nn.Module):
    """A residual path: half of a decoder's block, for what is dear."""

    def __init__(self, dim: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = GatedMLP(dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """With fewer heads for keys and values than for queries, if wanted."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.query = nn.Linear(dim, dim, bias=bias)
        self.key = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A decoder's."""

    def __init__(self, dim: int = 8, num_heads: int = 4, num_kv_heads: int = 2, hidden: int = 12) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads, num_kv_heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = GatedMLP(dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; the first and the last may share their matrix."""

    def __init__(
        self,
        vocab: int = 16,
        dim: int = 8,
        num_blocks: int = 2,
        tied: bool = False,
        block: Callable[[int], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def block_plan(head_dim: int, *, sequence: bool, prefix: str = "") -> dict[str, ParallelStyle]:
    """How a Block is cut, with activations whole between layers or cut along the sequence."""
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(head_dim=head_dim),
        "attention.key": ColwiseParallel(head_dim=head_dim),
        "attention.value": ColwiseParallel(head_dim=head_dim),
        "attention.out": RowwiseParallel(output_layouts=Shard(1) if sequence else None),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1) if sequence else None),
    }
    if sequence:
        for name in ("attention", "mlp"):
            plan[f"{name}_norm"] = SequenceParallel()
            plan[name] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {prefix + name: style for name, style in plan.items()}


def feeding_plan(*, sequence: bool, prefix: str = "") -> dict[str, ParallelStyle]:
    """How a Feeding is cut."""
    return {name: style for name, style in block_plan(2, sequence=sequence, prefix=prefix).items() if "mlp" in name}


def decoder_plan(head_dim: int, *, sequence: bool) -> dict[str, ParallelStyle]:
    """How a Decoder is cut; its logits come whole."""
    plan = block_plan(head_dim, sequence=sequence, prefix="blocks.*.")
    if sequence:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    else:
        plan["embedding"] = RowwiseParallel()
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def same_as_alone(
    make: Callable[[], nn.Module],
    plan: Callable[[], Any],
    x: torch.Tensor,
    num_ranks: int,
    *,
    enter: Callable[[torch.Tensor, DeviceMesh], torch.Tensor] = lambda x, _mesh: x,
    leave: Callable[[torch.Tensor, DeviceMesh], torch.Tensor] = lambda y, _mesh: y,
    rounds: int = 2,
) -> None:
    """Output, and gradients of parameters and input, equal the single process's, in fp64, again and again.

    `enter` makes of the whole input what the module is called with, `leave` of its output the whole, both
    differentiable.
    """
    torch.manual_seed(0)
    alone = make().double()
    inputs = x.double() if x.is_floating_point() else x

    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        reference = copy.deepcopy(alone)
        module = parallelize_module(copy.deepcopy(alone), mesh, plan())
        for _ in range(rounds):
            expected_x, own_x = (inputs.clone().requires_grad_(inputs.is_floating_point()) for _ in range(2))
            expected = reference(expected_x)
            result = leave(module(enter(own_x, mesh)), mesh)
            torch.testing.assert_close(result, expected)
            weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
            (expected * weights).sum().backward()
            (result * weights).sum().backward()
            if inputs.is_floating_point():
                torch.testing.assert_close(own_x.grad, expected_x.grad)
            check_gradients(module, reference)

    run_threads(num_ranks, on_rank)


def check_gradients(module: nn.Module, reference: nn.Module) -> None:
    """All parameters' gradients are those of the single process's, and lie as their parameters."""
    own = dict(module.named_parameters())
    for name, parameter in reference.named_parameters():
        grad = own[name].grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            assert grad.placements == own[name].placements, f"{name}: {grad.placements}"
            grad = grad.full_tensor()
        torch.testing.assert_close(grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def scattered(dim: int) -> Callable[[torch.Tensor, DeviceMesh], torch.Tensor]:
    """`enter` for modules that take parts along `dim`."""

    def enter(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(dim)]).to_local()

    return enter


def gathered(dim: int) -> Callable[[torch.Tensor, DeviceMesh], torch.Tensor]:
    """`leave` for modules that give parts along `dim`."""

    def leave(y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        whole = y if isinstance(y, DTensor) else DTensor.from_local(y, mesh, [Shard(dim)])
        return whole.full_tensor()

    return leave
