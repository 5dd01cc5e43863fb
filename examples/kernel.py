"""A Triton kernel of one's own as an operator: with a reference by torch's operators, a gradient, a rule for DTensors.

    disttrain-launch --standalone --nproc-per-node 2 examples/kernel.py

On GPUs the kernel computes, on CPUs its reference, or the kernel if Triton is there and TRITON_INTERPRET=1.
The operator is x * sigmoid(1.702 x), which approximates GELU (Hendrycks and Gimpel, arXiv 1606.08415).
"""

from __future__ import annotations

import torch
from torch import Tensor

import disttrain
from disttrain.dtensor import CommDebugMode, Shard, distribute_tensor, register_sharding
from disttrain.settings import TRITON_INTERPRET

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

if triton is not None:

    @triton.jit
    def run(x_at, grad_at, result_at, size, IS_BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
        places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_there = places < size
        x = tl.load(x_at + places, mask=is_there).to(tl.float32)
        share = tl.sigmoid(1.702 * x)
        if IS_BACKWARD:
            grad = tl.load(grad_at + places, mask=is_there).to(tl.float32)
            result = grad * share * (1.0 + 1.702 * x * (1.0 - share))
        else:
            result = x * share
        tl.store(result_at + places, result.to(result_at.dtype.element_ty), mask=is_there)


def uses_triton(x: Tensor) -> bool:
    return triton is not None and (x.is_cuda or bool(TRITON_INTERPRET.read()))


def launch(x: Tensor, grad: Tensor, is_backward: bool) -> Tensor:
    x, grad = x.contiguous(), grad.contiguous()
    result, block = torch.empty_like(x), 1024
    run[(triton.cdiv(x.numel(), block),)](x, grad, result, x.numel(), is_backward, BLOCK=block)
    return result


@torch.library.custom_op("example::quick_gelu", mutates_args=())
def quick_gelu(x: Tensor) -> Tensor:
    return launch(x, x, False) if uses_triton(x) else x * torch.sigmoid(1.702 * x)


@torch.library.custom_op("example::quick_gelu_backward", mutates_args=())
def quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    if uses_triton(x):
        return launch(x, grad, True)
    share = torch.sigmoid(1.702 * x)
    return grad * share * (1 + 1.702 * x * (1 - share))


# What comes out has the shape of what goes in: that is all a compiler needs to know.
quick_gelu.register_fake(torch.empty_like)
quick_gelu_backward.register_fake(lambda grad, x: torch.empty_like(x))
quick_gelu.register_autograd(
    lambda ctx, grad: quick_gelu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@register_sharding([torch.ops.example.quick_gelu.default, torch.ops.example.quick_gelu_backward.default])
def each_element_for_itself(*tensors):
    """Cut along any dim, each rank computes its part, and nothing is sent."""
    return [([Shard(dim)], [Shard(dim)] * len(tensors)) for dim in range(tensors[0].ndim)]


def main() -> None:
    disttrain.init_process_group()
    say = print if disttrain.get_rank() == 0 else lambda _: None
    device = disttrain.current_world().device
    torch.manual_seed(0)
    x = torch.randn(64, 48, device=device, requires_grad=True)
    computer = "the kernel" if uses_triton(x) else "torch's operators"
    say(f"computed by {computer}, on {device.type}")

    y = quick_gelu(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    wide = x.detach().double().requires_grad_()
    expected = wide * torch.sigmoid(1.702 * wide)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), wide)
    differences = ((y - expected).abs().max().item(), (gradient - expected_gradient).abs().max().item())
    say(f"it differs from fp64 by {differences[0]:.0e}, its gradient by {differences[1]:.0e}")

    compiled = torch.compile(lambda t: quick_gelu(t) * 2, fullgraph=True, backend="aot_eager")
    say(f"compiled as one call: {torch.equal(compiled(x), y * 2)}")

    mesh = disttrain.init_device_mesh(device.type, (disttrain.get_world_size(),), mesh_dim_names=("tp",))
    cut = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
    with CommDebugMode() as comms:
        result = quick_gelu(cut)
        result.sum().backward()
    same = torch.equal(result.full_tensor(), y) and torch.allclose(cut.grad.full_tensor(), gradient)
    say(f"on DTensors, cut as {list(result.placements)}: the same: {same}; {comms.get_total_counts()} collectives")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
