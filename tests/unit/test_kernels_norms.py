"""RMSNorm and LayerNorm, with and without a residual path, judged by torch's own in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.errors import ShapeError
from disttrain.kernels import layer_norm, rms_norm
from disttrain.testing import run_threads
from tests.cases.kernels import IMPLEMENTATIONS, drawn, judge, use_implementation
from tests.cases.shardings import laid_out, mesh_of

SHAPES = [(3, 5, 8), (7, 96), (1, 1), (33, 40)]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_implementation(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, implementation: str) -> torch.dtype:
    if implementation == "triton" and request.param is torch.float64:
        pytest.skip("its kernels take 32 bits at most")
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = shape[-1:]
    inputs = [drawn(*shape), drawn(*size, seed=1)]
    judge(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, size, w, 1e-5), inputs, dtype)
    judge(lambda x: rms_norm(x, eps=1e-5), lambda x: F.rms_norm(x, size, None, 1e-5), inputs[:1], dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = shape[-1:]
    inputs = [drawn(*shape), drawn(*size, seed=1), drawn(*size, seed=2)]
    judge(lambda x, w, b: layer_norm(x, w, b, 1e-3), lambda x, w, b: F.layer_norm(x, size, w, b, 1e-3), inputs, dtype)
    judge(lambda x, w: layer_norm(x, w, eps=1e-3), lambda x, w: F.layer_norm(x, size, w, None, 1e-3), inputs[:2], dtype)
    judge(lambda x: layer_norm(x, eps=1e-3), lambda x: F.layer_norm(x, size, eps=1e-3), inputs[:1], dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_residual_path_is_added_and_handed_on(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = shape[-1:]
    inputs = [drawn(*shape), drawn(*shape, seed=3), drawn(*size, seed=1)]
    judge(
        lambda x, r, w: rms_norm(x, w, 1e-5, residual=r),
        lambda x, r, w: (F.rms_norm(x + r, size, w, 1e-5), x + r),
        inputs,
        dtype,
    )
    judge(
        lambda x, r, w: layer_norm(x, w, residual=r),
        lambda x, r, w: (F.layer_norm(x + r, size, w), x + r),
        inputs,
        dtype,
    )


def test_of_two_results_one_may_be_unused(implementation: str) -> None:
    x = drawn(4, 6, dtype=torch.float32).requires_grad_()
    residual, weight = drawn(4, 6, seed=1, dtype=torch.float32), drawn(6, seed=2, dtype=torch.float32)
    for place in (0, 1):
        results = rms_norm(x, weight, 1e-5, residual=residual)
        wished = (F.rms_norm(x + residual, (6,), weight, 1e-5), x + residual)
        (found,) = torch.autograd.grad(results[place].square().sum(), x)
        (expected,) = torch.autograd.grad(wished[place].square().sum(), x)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_gradients_have_their_parameters_dtypes(implementation: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Sums over rows are rounded once, where they are made; those of unlike parameters, after that."""
    x = drawn(64, 8, dtype=torch.bfloat16).requires_grad_()
    weight, bias = (drawn(8, seed=seed, dtype=dtype).requires_grad_() for seed, dtype in enumerate(dtypes))
    found = torch.autograd.grad(layer_norm(x, weight, bias).sum(), (weight, bias))
    assert tuple(one.dtype for one in found) == dtypes
    torch.testing.assert_close(found[1], torch.full_like(bias, 64))
    (alike,) = torch.autograd.grad(rms_norm(x, weight).sum(), weight)
    assert alike.dtype == dtypes[0]


@pytest.mark.parametrize("memory_bytes", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("element_size", [2, 4])
def test_tiles_fit_into_shared_memory(element_size: int, memory_bytes: int) -> None:
    """As large as a GPU has it: an A100 has 163 KiB."""
    norms_triton = pytest.importorskip("disttrain.kernels.norms.triton_kernels", exc_type=ImportError)
    for row_size in (1, 96, 128, 1000, 4096, 8192, 20000, 32768):
        block, rows, num_tiles = norms_triton._backward_tile(row_size, element_size, memory_bytes)
        assert block >= row_size
        assert num_tiles >= 1
        row_bytes = 3 * block * element_size + 2 * 4  # and two statistics
        assert num_tiles == 1 or (num_tiles - 1) * rows * row_bytes < memory_bytes
    assert norms_triton._backward_tile(8192, 2, 227 << 10) == (8192, 1, 3)


def test_nothing_is_normed(implementation: str) -> None:
    x = torch.zeros(0, 4, 6, requires_grad=True)
    weight = torch.ones(6, requires_grad=True)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == (0, 4, 6)
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 6


def test_input_that_is_not_contiguous(implementation: str) -> None:
    x = drawn(6, 4, 5, dtype=torch.float32)
    torch.testing.assert_close(rms_norm(x.transpose(0, 2)), F.rms_norm(x.transpose(0, 2), (6,)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_default_eps_is_torch_s(dtype: torch.dtype) -> None:
    x = torch.full((1, 4), 1e-4, dtype=dtype)
    torch.testing.assert_close(rms_norm(x), F.rms_norm(x, (4,)))


def test_a_graph_holds_it_unbroken() -> None:
    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = rms_norm(x.sin(), weight, residual=residual)
        return (y * total).sum()

    inputs = [drawn(4, 6).requires_grad_(), drawn(4, 6, seed=1), drawn(6, seed=2).requires_grad_()]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    wished = torch.autograd.grad(run(*inputs), [inputs[0], inputs[2]])
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), [inputs[0], inputs[2]]), wished)


def test_vmap() -> None:
    x, weight = drawn(3, 4, 6), drawn(3, 6, seed=1)
    whole = torch.vmap(lambda x: layer_norm(x, weight[0]), in_dims=1, out_dims=1)(x)
    torch.testing.assert_close(whole, layer_norm(x, weight[0]))
    each = torch.vmap(rms_norm)(x, weight)
    torch.testing.assert_close(each, torch.stack([F.rms_norm(a, (6,), w) for a, w in zip(x, weight, strict=True)]))


def test_gradients_are_not_differentiable() -> None:
    x = drawn(4, 6).requires_grad_()
    (grad,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="norm_backward is not differentiable"):
        grad.sum().backward()


@pytest.mark.filterwarnings("error")
def test_dtensors_stay_cut() -> None:
    x, weight = drawn(4, 6, 8), drawn(8, seed=1)
    plain_x, plain_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y, total = layer_norm(plain_x, plain_weight, residual=x)
    (y * total).square().sum().backward()

    def body() -> None:
        mesh = mesh_of((2,))
        for dim in (0, 1):
            own, own_weight = laid_out(x, mesh, [Shard(dim)]), laid_out(weight, mesh, [Replicate()])
            own.requires_grad_()
            own_weight.requires_grad_()
            found, sum_found = layer_norm(own, own_weight, residual=own.detach())
            assert isinstance(found, DTensor)
            assert found.placements == sum_found.placements == (Shard(dim),)
            torch.testing.assert_close(found.full_tensor(), y.detach())
            (found * sum_found).square().sum().backward()
            assert own.grad.placements == (Shard(dim),)
            torch.testing.assert_close(own.grad.full_tensor(), plain_x.grad)
            torch.testing.assert_close(own_weight.grad.full_tensor(), plain_weight.grad)

    run_threads(2, body)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"rms_norm: weight has shape \(5,\); x's last dim is 6"):
        rms_norm(torch.ones(4, 6), torch.ones(5))
    with pytest.raises(ShapeError, match=r"x is torch.int64"):
        rms_norm(torch.ones(4, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"residual is torch.float32 of shape"):
        layer_norm(torch.ones(4, 6), residual=torch.ones(4, 1))
    with pytest.raises(ShapeError, match="a bias without a weight"):
        layer_norm(torch.ones(4, 6), None, torch.ones(6))
