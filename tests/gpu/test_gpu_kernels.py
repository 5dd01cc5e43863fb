"""Triton's kernels on a GPU, judged by torch's operators in fp64, and refused fallbacks: they must be used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llama.config import PRESETS
from llama.model import Llama
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import disttrain
from disttrain.errors import BackendError
from disttrain.kernels import (
    SGD,
    AdamW,
    Lion,
    choice,
    geglu,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rotate,
    rotate_,
    swiglu,
    use_kernels,
)
from disttrain.kernels.copies import reference as copies_reference
from disttrain.kernels.copies.operator import copy_all, pack_rows, unpack_rows
from disttrain.pieces import piece, piece_size
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.kernel_operators import CASES, check_what_is_told
from tests.cases.kernels import drawn, judge
from tests.gpu.ranks import NUM_GPU_RANKS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.language")
    if "rank_pool" in request.fixturenames:
        return  # the pool's processes would keep it
    monkeypatch.setenv("DISTTRAIN_KERNELS", "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(700, 4096), (3, 40, 128), (5, 20000), (1, 1), (64, 8192), (1000, 96)], ids=str)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = shape[-1:]
    x, residual = drawn(*shape).cuda(), drawn(*shape, seed=3).cuda()
    weight, bias = drawn(*size, seed=1).cuda(), drawn(*size, seed=2).cuda()
    judge(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, size, w, 1e-5), [x, weight], dtype)
    judge(lambda x: rms_norm(x, eps=1e-5), lambda x: F.rms_norm(x, size, None, 1e-5), [x], dtype)
    judge(layer_norm, lambda x, w, b: F.layer_norm(x, size, w, b), [x, weight, bias], dtype)
    judge(
        lambda x, r, w: rms_norm(x, w, 1e-5, residual=r),
        lambda x, r, w: (F.rms_norm(x + r, size, w, 1e-5), x + r),
        [x, residual, weight],
        dtype,
    )
    judge(
        lambda x, r, w, b: layer_norm(x, w, b, residual=r),
        lambda x, r, w, b: (F.layer_norm(x + r, size, w, b), x + r),
        [x, residual, weight, bias],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_products(dtype: torch.dtype) -> None:
    gate, up = 3 * drawn(37, 5000).cuda(), drawn(37, 5000, seed=1).cuda()
    judge(swiglu, lambda gate, up: F.silu(gate) * up, [gate, up], dtype)
    judge(geglu, lambda gate, up: F.gelu(gate) * up, [gate, up], dtype)
    judge(
        lambda gate, up: geglu(gate, up, "tanh"),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        [gate, up],
        dtype,
    )
    judge(lambda both: swiglu(*both.chunk(2, -1)), lambda both: F.silu(both[:, :2500]) * both[:, 2500:], [gate], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotation(is_interleaved: bool, dtype: torch.dtype) -> None:
    turns = torch.outer(torch.arange(50), 10 ** -torch.arange(32, dtype=torch.float64) / 32).cuda()
    cos, sin = turns.cos(), turns.sin()

    def wished(x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (-1, 2)) if is_interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
        return turned.flatten(-2) if is_interleaved else turned.transpose(-1, -2).flatten(-2)

    for x in (drawn(2, 7, 50, 64).cuda(), drawn(2, 50, 33, 64).cuda().transpose(1, 2)):
        for run in (
            lambda x: rotate(x, cos.float(), sin.float(), is_interleaved=is_interleaved),
            lambda x: rotate_(x * 1, cos.float(), sin.float(), is_interleaved=is_interleaved),
        ):
            judge(run, wished, [x], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_elements", [10**7, 700 * 5003, 200_000])
def test_linear_loss(num_elements: int, dtype: torch.dtype) -> None:
    hidden, weight, bias = drawn(1500, 256).cuda(), drawn(5003, 256, seed=1).cuda() / 16, drawn(5003, seed=2).cuda()
    target = torch.randint(0, 5003, (1500,), generator=torch.Generator().manual_seed(0)).cuda()
    target[::7] = -100
    class_weight = drawn(5003, seed=4).square().cuda()
    options = {"label_smoothing": 0.1, "reduction": "sum"}
    size = num_elements * dtype.itemsize
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    for cap in (0.0, 3.0):
        loss = linear_cross_entropy(
            leaves[0],
            leaves[1],
            target,
            leaves[2],
            class_weight=class_weight,
            soft_cap=cap,
            block_bytes=size,
            **options,
        )
        logits = F.linear(*exact)
        logits = cap * (logits / cap).tanh() if cap else logits
        wished = F.cross_entropy(logits, target, class_weight, **options)
        found, expected = torch.autograd.grad(loss, leaves), torch.autograd.grad(wished, exact)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(loss.double(), wished, rtol=tolerance, atol=0.0)
        for one, other in zip(found, expected, strict=True):
            assert ((one.double() - other).norm() / other.norm()).item() < (1e-4 if dtype is torch.float32 else 1e-2)


def test_memory_is_that_of_blocks() -> None:
    hidden = drawn(4096, 512, dtype=torch.bfloat16).cuda().requires_grad_()
    weight = (drawn(32000, 512, dtype=torch.bfloat16).cuda() / 20).requires_grad_()
    target = torch.arange(4096, device="cuda")
    linear_cross_entropy(hidden, weight, target, block_bytes=16 << 20).backward()  # whatever a first call keeps
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, target, block_bytes=16 << 20).backward()
    grads = 3 * weight.nbytes + 3 * hidden.nbytes  # in fp32, and as the parameters are
    assert torch.cuda.max_memory_allocated() - before < grads + (34 << 20)
    assert grads + (34 << 20) < 4096 * 32000 * 2


@on_ranks(NUM_GPU_RANKS)
def test_classes_cut_among_gpus() -> None:
    group = disttrain.init_device_mesh("cuda", (NUM_GPU_RANKS,))
    whole_hidden, whole_weight = drawn(300, 64).float().cuda(), drawn(1001, 64, seed=1).float().cuda()
    target = torch.arange(300, device="cuda")
    leaves = [whole_hidden.clone().requires_grad_(), whole_weight.clone().requires_grad_()]
    wished = F.cross_entropy(F.linear(*leaves), target)
    wished.backward()
    size, first = piece(1001, NUM_GPU_RANKS, disttrain.get_rank())
    hidden = whole_hidden.requires_grad_()
    weight = whole_weight.narrow(0, first, size).contiguous().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, group=group, vocab_size=1001, block_bytes=100 << 10)
    loss.backward()
    torch.testing.assert_close(loss, wished.detach())
    torch.testing.assert_close(hidden.grad, leaves[0].grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weight.grad, leaves[1].grad.narrow(0, first, size), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor loads
def test_inductor_takes_them_unbroken() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        y, total = rms_norm(x, weight, 1e-5, residual=x.sin())
        return linear_cross_entropy(swiglu(y, total), head, torch.arange(len(x), device=x.device))

    leaves = [
        drawn(*shape, seed=n).float().cuda().requires_grad_() for n, shape in enumerate([(40, 64), (64,), (90, 64)])
    ]
    compiled = torch.compile(run, fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(run(*leaves), leaves), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*It is computed by torch's operators")  # fp64 is
@pytest.mark.parametrize("name", CASES)
def test_what_compilers_are_told_is_what_comes_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTRAIN_KERNELS", "auto")
    check_what_is_told(name, FakeTensorMode(), "cuda")


def test_a_model_in_bf16() -> None:
    """Nearer to itself in fp64 with kernels than without, or as near."""
    torch.manual_seed(0)
    model = Llama(PRESETS["small"]).cuda()
    model.init()
    exact, other = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    model = model.bfloat16()
    use_kernels(other, report=lambda _: None)
    tokens = torch.randint(0, 256, (2, 200), device="cuda")
    wished, plain, found = (each(tokens).double() for each in (exact, model, other))
    assert (found - wished).norm() < 1.1 * (plain - wished).norm()
    for each in (exact, model, other):
        each(tokens).float().logsumexp(-1).sum().backward()
    for true, theirs, ours in zip(exact.parameters(), model.parameters(), other.parameters(), strict=True):
        error, allowed = ((each.grad.double() - true.grad).norm() for each in (ours, theirs))
        assert error < 1.3 * allowed + 1e-3 * true.grad.norm()


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_optimizers(ours: Any, theirs: Any, options: dict[str, Any], is_aligned: bool) -> None:
    sizes = [(3, 5), (70001,), (1,), (0, 4), (300, 512)]

    def made(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        """Perhaps one element off what a thread reads at once."""
        values = drawn(*shape, seed=seed).float().cuda()
        return torch.cat([values.flatten()[:1], values.flatten()])[1:].view(shape) if not is_aligned else values

    own, other = ([nn.Parameter(made(shape, seed)) for seed, shape in enumerate(sizes)] for _ in range(2))
    optimizer, wished = ours(own, max_norm=2.0, **options), theirs(other, **options)
    for step in range(3):
        for place, (one, two) in enumerate(zip(own, other, strict=True)):
            one.grad, two.grad = (drawn(*one.shape, seed=9 * step + place).float().cuda() for _ in range(2))
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(other, 2.0)
        wished.step()
    torch.testing.assert_close(own, other)


def test_masters_and_rounding_at_random() -> None:
    own = nn.Parameter(drawn(1000, 100).bfloat16().cuda())
    optimizer = AdamW([own], state_dtype=torch.bfloat16)
    own.grad = torch.randn_like(own)
    optimizer.step()
    assert torch.equal(own.detach(), optimizer.state[own]["master"].bfloat16())
    alone = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16, device="cuda"))
    plain = SGD([alone], lr=1.0, keep_master=False)
    for _ in range(32):
        alone.grad = torch.full_like(alone, -1e-4)
        plain.step()
    assert alone.detach().double().mean().item() == pytest.approx(1 + 32e-4, rel=1e-4)


def test_what_kernels_do_not_take_is_refused_or_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(3, 5).cuda()
    with pytest.raises(BackendError, match=r"norm: its kernels don't take torch.float64. Set DISTTRAIN_KERNELS=auto"):
        rms_norm(x)
    monkeypatch.setenv("DISTTRAIN_KERNELS", "auto")
    choice._warn.cache_clear()  # another test may have been told
    with pytest.warns(UserWarning, match="It is computed by torch's operators"):
        rms_norm(x)
    rms_norm(x)


def test_copies() -> None:
    sources = [drawn(*shape, seed=seed).bfloat16().cuda() for seed, shape in enumerate([(3, 5), (70001,), (64, 512)])]
    targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
    copy_all(targets, sources)
    assert all(torch.equal(found, wished.float()) for found, wished in zip(targets, sources, strict=True))
    back = [torch.empty_like(source) for source in sources]
    copy_all(back, targets, torch.tensor(3.0, device="cuda"))
    assert all(torch.equal(found, (wished * 3).bfloat16()) for found, wished in zip(back, targets, strict=True))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.uint8,) * 2], ids=str
)
@pytest.mark.parametrize("shapes", [[(5, 3), (1,), (0, 4), (2, 70)], [(48, 16), (96,), (3000, 160)]], ids=str)
def test_rows_of_gathers_and_reductions(
    shapes: list[tuple[int, ...]], dtypes: tuple[torch.dtype, torch.dtype], num_rows: int
) -> None:
    """Bit for bit as torch's, in a row of a wider matrix too, also in a graph whose tables others have pushed out."""
    tensors = [drawn(*shape, seed=seed).mul(50).cuda().to(dtypes[0]) for seed, shape in enumerate(shapes)]
    sizes = [piece_size(len(each), num_rows) * each[:1].numel() for each in tensors]
    wished = torch.full((num_rows, sum(sizes) + 3), 7, dtype=dtypes[1], device="cuda")
    found = wished.clone()
    copies_reference.pack_rows([each for each in tensors if each.numel()], sizes, wished[:, : sum(sizes)])
    pack_rows(tensors, sizes, found[:, : sum(sizes)])
    assert torch.equal(found, wished)
    places = [torch.empty(num_rows, size, dtype=dtypes[0], device="cuda") for size in sizes]
    wished_places = [torch.empty_like(place) for place in places]
    copies_reference.unpack_rows(wished[:, : sum(sizes)], sizes, wished_places)
    graph = torch.cuda.CUDAGraph()
    unpack_rows(found[:, : sum(sizes)], sizes, places)
    with torch.cuda.graph(graph):
        unpack_rows(found[:, : sum(sizes)], sizes, places)
    for place in places:
        place.zero_()
    pack_rows([torch.ones(64, 3, device="cuda")], [192], torch.empty(1, 192, device="cuda"))
    graph.replay()
    assert all(torch.equal(place, wish) for place, wish in zip(places, wished_places, strict=True))


def test_copies_in_a_graph_find_their_tensors_at_each_replay() -> None:
    sources = [drawn(*shape, seed=seed).cuda().bfloat16() for seed, shape in enumerate([(3, 5), (70001,)])]
    targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
    copy_all(targets, sources)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_all(targets, sources)
    for _ in range(300):
        # Others, whose tables take what memory there is.
        copy_all([torch.empty(64, device="cuda")], [torch.ones(64, device="cuda", dtype=torch.bfloat16)])
    for _ in range(2):
        for target in targets:
            target.zero_()
        graph.replay()
        assert all(torch.equal(found, wished.float()) for found, wished in zip(targets, sources, strict=True))


@pytest.mark.parametrize("make", [AdamW, Lion, SGD])
def test_a_step_in_a_graph_is_refused_as_nothing_has_been_changed(make: Any) -> None:
    parameter = nn.Parameter(drawn(64, 3).float().cuda())
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter], lr=0.1)
    optimizer.step()
    before, steps = parameter.detach().clone(), optimizer.state[parameter]["step"].item()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = parameter * 2
        with pytest.raises(BackendError, match=rf"{make.__name__}.step: a CUDA graph is being captured"):
            optimizer.step()
    graph.replay()
    assert torch.equal(doubled, 2 * before)
    assert torch.equal(parameter, before)
    assert optimizer.state[parameter]["step"].item() == steps == 1
    optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 2
    assert not torch.equal(parameter, before)
