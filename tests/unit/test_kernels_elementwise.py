"""SwiGLU, GeGLU and rotary positions, judged by torch's operators in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from disttrain.dtensor import Replicate, Shard
from disttrain.errors import ShapeError
from disttrain.kernels import geglu, rotate, rotate_, swiglu
from disttrain.testing import run_threads
from tests.cases.kernels import IMPLEMENTATIONS, drawn, judge, use_implementation
from tests.cases.shardings import laid_out, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of Triton's interpreter

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_implementation(request.param, monkeypatch)
    if request.param == "triton" and "float64" in request.node.name:
        pytest.skip("its kernels take 32 bits at most")
    return str(request.param)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """By multiplication of complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if is_interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    return turned.flatten(-2) if is_interleaved else turned.transpose(-1, -2).flatten(-2)


def angles(num_positions: int, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.outer(torch.arange(num_positions), 10 ** -torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 1500), (1,), (0, 4)], ids=str)
def test_gated_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [3 * drawn(*shape), drawn(*shape, seed=1)]
    judge(swiglu, lambda gate, up: F.silu(gate) * up, inputs, dtype)
    judge(geglu, lambda gate, up: F.gelu(gate) * up, inputs, dtype)
    judge(
        lambda gate, up: geglu(gate, up, "tanh"), lambda gate, up: F.gelu(gate, approximate="tanh") * up, inputs, dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_one_tensor(dtype: torch.dtype) -> None:
    judge(
        lambda both: swiglu(*both.chunk(2, -1)),
        lambda both: F.silu(both[..., :7]) * both[..., 7:],
        [drawn(4, 3, 14)],
        dtype,
    )
    judge(lambda x: swiglu(x.t(), x.t()), lambda x: F.silu(x.t()) * x.t(), [drawn(4, 3)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 40, 4, 12), (1, 1, 1, 2)], ids=str)
def test_rotation(shape: tuple[int, int, int, int], is_interleaved: bool, dtype: torch.dtype) -> None:
    cos, sin = angles(shape[2], shape[3] // 2)
    own = (cos.to(torch.promote_types(dtype, torch.float32)), sin.to(torch.promote_types(dtype, torch.float32)))
    x = drawn(*shape)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        judge(
            lambda x: rotate(x, *own, is_interleaved=is_interleaved),
            lambda x: rotated(x, cos, sin, is_interleaved),
            [given],
            dtype,
        )
        judge(
            lambda x: rotate_(x * 2, *own, is_interleaved=is_interleaved),
            lambda x: rotated(x * 2, cos, sin, is_interleaved),
            [given],
            dtype,
        )


def test_a_rotation_in_place_keeps_its_memory() -> None:
    cos, sin = (tensor.float() for tensor in angles(5, 4))
    x = drawn(2, 3, 5, 8, dtype=torch.float32)
    wished = rotate(x, cos, sin)
    gapped = torch.zeros(2, 3, 5, 8, 2)[..., 0].copy_(x)
    for one in (x, gapped):
        assert rotate_(one, cos, sin) is one
        torch.testing.assert_close(one, wished)


def test_graphs_hold_them_unbroken() -> None:
    cos, sin = (tensor.float() for tensor in angles(5, 4))

    def run(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        turned = rotate_(swiglu(x, up).view(2, 3, 5, 8), cos, sin)
        return rotate(turned, cos, sin, is_interleaved=True).square().sum()

    x, up = (drawn(240, seed=seed, dtype=torch.float32).requires_grad_() for seed in (0, 1))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, up), [x, up]), torch.autograd.grad(run(x, up), [x, up]))


def test_vmap() -> None:
    gate, up = drawn(3, 4, dtype=torch.float32), drawn(4, dtype=torch.float32)
    torch.testing.assert_close(torch.vmap(swiglu, (0, None))(gate, up), F.silu(gate) * up)


def test_dtensors_stay_cut(implementation: str) -> None:
    if implementation == "triton":
        pytest.skip("its interpreter knows no threads")
    gate, up = drawn(4, 6, dtype=torch.float32), drawn(4, 6, seed=1, dtype=torch.float32)

    def body() -> None:
        mesh = mesh_of((2,))
        for dim in (0, 1):
            own, factor = (laid_out(tensor, mesh, [Shard(dim)]).requires_grad_() for tensor in (gate, up))
            result = swiglu(own, factor)
            assert result.placements == (Shard(dim),)
            torch.testing.assert_close(result.full_tensor(), F.silu(gate) * up)
            result.sum().backward()
            assert own.grad.placements == (Shard(dim),)
            torch.testing.assert_close(factor.grad.full_tensor(), F.silu(gate))
        cos, sin = (tensor.float() for tensor in angles(5, 4))
        x = drawn(2, 4, 5, 8, dtype=torch.float32)
        whole = [laid_out(angle, mesh, [Replicate()]) for angle in (cos, sin)]
        for dim in (0, 1):
            turned = rotate(laid_out(x, mesh, [Shard(dim)]), *whole)
            assert turned.placements == (Shard(dim),)
            torch.testing.assert_close(turned.full_tensor(), rotate(x, cos, sin))

    run_threads(2, body)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"swiglu: gate is torch.float32 of shape \(2,\), up torch.float32 of \(1,\)"):
        swiglu(torch.ones(2), torch.ones(1))
    with pytest.raises(ShapeError, match="approximate is 'sigmoid'"):
        geglu(torch.ones(2), torch.ones(2), "sigmoid")
    with pytest.raises(ShapeError, match=r"rotate: cos has shape \(2, 2\)"):
        rotate(torch.ones(1, 1, 2, 2), torch.ones(2, 2), torch.ones(2, 1))
    with pytest.raises(ShapeError, match="elements even"):
        rotate(torch.ones(1, 1, 2, 3), torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(ShapeError, match="a leaf"):
        rotate_(torch.ones(1, 1, 2, 2, requires_grad=True), torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(ShapeError, match=r"rotate_: x is expanded: its shape is \(1, 3, 2, 2\).* Use rotate, or"):
        rotate_(torch.ones(1, 1, 2, 2).expand(1, 3, 2, 2), torch.ones(2, 1), torch.ones(2, 1))
