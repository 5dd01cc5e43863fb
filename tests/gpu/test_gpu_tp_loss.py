"""The vocabulary-parallel loss on GPUs: Triton's kernels, judged by torch's, and over NCCL by one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttrain
from disttrain.dtensor import CommDebugMode, Shard, distribute_tensor
from disttrain.kernels.cross_entropy import pieces as cross_entropy_pieces
from disttrain.kernels.cross_entropy.pieces import LossTerms
from disttrain.pieces import piece
from disttrain.testing.pytest_plugin import on_ranks
from disttrain.tp.loss.context import loss_parallel
from disttrain.tp.loss.vocab_parallel import vocab_parallel_cross_entropy
from tests.gpu.ranks import NUM_GPU_RANKS

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every rank."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).cuda()


def part(whole: torch.Tensor) -> torch.Tensor:
    size, first = piece(whole.shape[-1], disttrain.get_world_size(), disttrain.get_rank())
    return whole.narrow(-1, first, size)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(64, 16000), (37, 20001), (5, 7), (1, 1)])
def test_kernels_are_as_their_references(shape: tuple[int, int], dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from disttrain.kernels.cross_entropy import (
        triton_kernels as cross_entropy_triton,  # as the library does, where Triton is
    )

    num_rows, num_own = shape
    first_class, num_classes = 11, num_own + 50
    gapped = 3 * normal(num_rows, num_own + 16, dtype=dtype)
    target = torch.randint(0, num_classes, (num_rows,), generator=torch.Generator().manual_seed(0)).cuda()
    target[::5], target[0] = -100, first_class + num_own - 1
    grad_rows = normal(num_rows, seed=1)
    weight = normal(num_classes, seed=2).square()
    for logits in (gapped[:, :num_own], gapped[:, :num_own].contiguous()):
        logits[0, 0] = float("-inf")
        for own_weight, smoothing, z_loss in (
            (None, 0.0, 0.0),
            (None, 0.1, 0.0),
            (weight, 0.1, 0.01),
            (weight, 0.0, 0.01),
        ):
            terms = LossTerms(num_classes, first_class, -100, smoothing, z_loss)
            wished = cross_entropy_pieces.statistics_of_classes(logits, target, own_weight, terms)
            found = cross_entropy_triton.statistics_of_classes(logits, target, own_weight, terms)
            torch.testing.assert_close(found, wished, atol=1e-2, rtol=1e-5)
            finite = wished.nan_to_num(0.0, 0.0, 0.0)
            of_ranks = torch.stack([finite, finite + 1])
            wished_pair = cross_entropy_pieces.combined_of_classes(of_ranks, target, own_weight, terms)
            pair = cross_entropy_triton.combined_of_classes(of_ranks, target, own_weight, terms)
            torch.testing.assert_close(pair, wished_pair, atol=1e-4, rtol=1e-5)
            for grads in (grad_rows, grad_rows[0].expand(num_rows)):
                arguments = (logits, pair[1], target, grads, own_weight, terms)
                wished = cross_entropy_pieces.gradient_of_classes(*arguments)
                grad = cross_entropy_triton.gradient_of_classes(*arguments)
                torch.testing.assert_close(grad, wished, atol=CLOSE[dtype] * 1e-2, rtol=CLOSE[dtype])


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_one_process(dtype: torch.dtype, is_compiled: bool) -> None:
    vocab_size = 4099
    target = torch.randint(0, vocab_size, (300,), generator=torch.Generator().manual_seed(0)).cuda()
    target[::7] = -100
    weight = normal(vocab_size, seed=2).square()
    wanted = normal(300, vocab_size, seed=1).softmax(1)
    cases: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (target, {}),
        (target, {"weight": weight, "label_smoothing": 0.1}),
        (wanted, {"weight": weight, "label_smoothing": 0.1}),
    ]
    for goal, options in cases:
        torch._dynamo.reset()

        def loss_of(logits: torch.Tensor, goal: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
            return vocab_parallel_cross_entropy(logits, goal, vocab_size=4099, **options)

        run = torch.compile(loss_of, fullgraph=True) if is_compiled else loss_of
        logits = 3 * normal(300, vocab_size, dtype=dtype)
        whole = logits.float().requires_grad_()
        expected = F.cross_entropy(whole, goal, **options)
        expected.backward()
        assert whole.grad is not None
        own = part(logits).detach().requires_grad_()
        with CommDebugMode() as comms:
            loss = run(own, goal)
            loss.backward()
        assert comms.get_total_counts() == (NUM_GPU_RANKS > 1)
        torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
        assert own.grad is not None
        wished = part(whole.grad)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(own.grad, wished.to(dtype), atol=1e-7, rtol=tolerance)


@on_ranks(NUM_GPU_RANKS)
def test_a_target_out_of_range_is_a_loss_of_nan() -> None:
    own = part(normal(4, 100)).detach().requires_grad_()
    target = torch.tensor([3, 100, -100, 99], device="cuda")
    loss = vocab_parallel_cross_entropy(own, target, vocab_size=100, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, False]


@on_ranks(NUM_GPU_RANKS)
def test_dtensors_within_the_context() -> None:
    mesh = disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,))
    whole = normal(64, 1000).requires_grad_()
    target = torch.arange(64, device="cuda")
    expected = F.cross_entropy(whole, target)
    expected.backward()
    logits = distribute_tensor(whole.detach(), mesh, [Shard(1)]).detach().requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(logits, target)
    loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected.detach())
    torch.testing.assert_close(logits.grad.full_tensor(), whole.grad)


@pytest.mark.filterwarnings("ignore:cross_entropy. its kernels don't take torch.float64")
@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize(("dtype", "spare_mib"), [(torch.bfloat16, 1), (torch.float64, 40)])
def test_memory_is_that_of_the_gradient(dtype: torch.dtype, spare_mib: int) -> None:
    """Triton's kernels need but numbers per row, torch's a piece of 32 MiB of fp64."""
    num_rows, vocab_size = 2048, 16000
    own = part(normal(num_rows, vocab_size, dtype=dtype)).contiguous().requires_grad_()
    target = torch.arange(num_rows, device="cuda")
    vocab_parallel_cross_entropy(own, target, vocab_size=vocab_size).backward()  # whatever is kept after a first call
    own.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = vocab_parallel_cross_entropy(own, target, vocab_size=vocab_size)
    assert torch.cuda.max_memory_allocated() - before < spare_mib * 2**20
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < own.nbytes + spare_mib * 2**20
