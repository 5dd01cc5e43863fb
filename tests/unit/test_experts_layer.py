"""A layer with a router of ours: losses over sequences, and padding; and experts in float8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from disttrain.errors import ShapeError
from disttrain.experts import Balance, Experts, MixtureOfExperts, Router, RouterRule
from disttrain.experts.expert_layer import ExpertLayer
from disttrain.kernels import rms_norm, use_float8


def layer(**balance: object) -> MixtureOfExperts:
    torch.manual_seed(0)
    rule = RouterRule(4, 2)
    return MixtureOfExperts(Router(8, rule, Balance(**balance)), Experts(4, 8, 6))  # type: ignore[arg-type]


def test_losses_over_sequences_see_sequences() -> None:
    x = torch.randn(3, 5, 8)
    grads = []
    for coefficient in (0.0, 1.0):
        moe = layer(aux_loss_coeff=coefficient, over="sequence")
        moe(x).sum().backward()
        grads.append(moe.router.weight.grad)
    assert not torch.equal(*grads)


def test_padding_goes_to_no_expert() -> None:
    x = torch.randn(2, 4, 8)
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    moe = layer()
    result = moe(x, mask)
    assert not result[~mask].any()
    torch.testing.assert_close(result[mask], layer()(x[mask]))


def test_a_router_of_another_form_takes_tokens() -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            assert x.dim() == 2
            return x[:, :4], torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64)

    moe = MixtureOfExperts(Other(), Experts(4, 8, 6))
    assert moe(torch.randn(2, 3, 8)).shape == (2, 3, 8)
    with pytest.raises(ShapeError, match="chooses among 4 experts, and there are 5"):
        MixtureOfExperts(Other(), Experts(5, 8, 6))(torch.randn(2, 3, 8))


def test_routers_and_experts_that_do_not_fit() -> None:
    router = Router(8, RouterRule(4, 2))
    for num_experts, width, text in ((5, 8, "among 4 experts, and there are 5"), (4, 6, "tokens of 8, experts of 6")):
        with pytest.raises(ShapeError, match=text):
            MixtureOfExperts(router, Experts(num_experts, width, 6))
    with pytest.raises(ShapeError, match="there are 0 experts"):
        Experts(0, 8, 6)


def rounded(matrix: torch.Tensor, recipe: str) -> torch.Tensor:
    """To float8 and back: scales are the powers of two by which the largest values just fit."""
    largest = (matrix.abs().amax(-1, keepdim=True) if recipe == "rowwise" else matrix.abs().max()).clamp(min=1e-30)
    scale = 2.0 ** (largest / 448).log2().ceil()
    return (matrix / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_in_float8_multiplies_what_was_rounded(recipe: str) -> None:
    torch.manual_seed(0)
    layer = Experts(3, 32, 48)
    # Sizes that are none for float8 keep their dtype.
    model = nn.ModuleDict({"experts": layer, "narrow": Experts(3, 32, 40)})
    lines: list[str] = []
    assert not use_float8(model, recipe, report=lines.append)
    assert "left experts, narrow: experts' products change with experts=True alone" in "\n".join(lines)
    lines.clear()
    assert [each.name for each in use_float8(model, recipe, experts=True, report=lines.append)] == ["experts"]
    assert "left narrow: sizes are no multiples of 16" in "\n".join(lines)
    x, weights = torch.randn(20, 32), torch.rand(20, 2)
    indices = torch.rand(20, 3).topk(2).indices
    given = x.clone().requires_grad_()
    out = layer(given, indices, weights)
    expected = torch.zeros(20, 32)
    gate_up, down = layer.gate_up_proj.detach(), layer.down_proj.detach()
    chosen = weights.new_zeros(20, 3).scatter(1, indices, weights)
    for expert in range(3):
        # Scales are of an expert's own rows and weights.
        is_own = chosen[:, expert] > 0
        into, back = rounded(gate_up[expert], recipe), rounded(down[expert], recipe)
        gate, up = (rounded(x[is_own], recipe) @ into.T).chunk(2, -1)
        hidden = F.silu(gate) * up * chosen[is_own, expert, None]
        expected[is_own] += rounded(hidden, recipe) @ back.T
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    exact = Experts(3, 32, 48)
    exact.load_state_dict(layer.state_dict())
    wide = x.clone().requires_grad_()
    exact(wide, indices, weights).square().sum().backward()
    out.square().sum().backward()
    for one, two in zip((given, *layer.parameters()), (wide, *exact.parameters()), strict=True):
        assert 0 < (one.grad - two.grad).norm() < 0.12 * two.grad.norm()


def test_second_derivatives_are_one_error() -> None:
    moe = layer()
    x = torch.randn(5, 8, requires_grad=True)
    for loss in (moe(x).square().sum(), moe(x).sum()):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        assert grad.shape == x.shape
        with pytest.raises(NotImplementedError, match="The backward of expert_mlp is not differentiable"):
            (grad.square() + x).sum().backward()
    with pytest.raises(NotImplementedError, match=r"The backward of .*expert_mlp is not differentiable"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: moe(y).sum())(x).sum())(x.detach())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by which torch makes jvp ready
def test_a_tensor_that_has_outlived_its_transform() -> None:
    torch.manual_seed(0)
    layer = Experts(4, 8, 6)
    weights, indices = torch.randn(5, 4).softmax(-1).topk(2)
    leaf = torch.randn(5, 8, requires_grad=True)
    kept = []

    def function(x: torch.Tensor) -> torch.Tensor:
        kept.append(x + leaf - x)
        return kept[-1].sum()

    torch.func.grad(function)(torch.zeros(5, 8))
    grads = [torch.autograd.grad(layer(x, indices, weights).sum(), leaf)[0] for x in (kept[-1], leaf)]
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by which torch makes jvp ready
@pytest.mark.parametrize("is_of_ours", [True, False])
def test_transforms_of_functions(is_of_ours: bool) -> None:
    moe = layer(aux_loss_coeff=0.1, z_loss_coeff=0.1)
    if not is_of_ours:
        # Rows are taken and summed up one by one.
        moe.experts.mix_here = lambda *given: ExpertLayer.mix_here(moe.experts, *given)
    x = torch.randn(5, 8)
    parameters = dict(moe.named_parameters())
    expected = torch.autograd.grad(moe(x).square().sum(), [*parameters.values()])

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(moe, parameters, (x,)).square().sum()

    grads = torch.func.grad(loss)({name: value.detach() for name, value in parameters.items()})
    for grad, other in zip(grads.values(), expected, strict=True):
        torch.testing.assert_close(grad, other)
    # torch would have a tangent of zeros come out of an operator.
    with pytest.raises(NotImplementedError, match=r"forward derivative|jvp"):
        torch.func.jvp(moe, (x,), (x,))
    with pytest.raises(NotImplementedError, match=r"forward derivative|jvp"), forward_ad.dual_level():
        moe(forward_ad.make_dual(x, x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by which torch makes jvp ready
def test_kernels_have_no_forward_derivatives() -> None:
    x = torch.randn(5, 8)
    with pytest.raises(NotImplementedError, match=r"disttrain::norm has no forward derivative"):
        torch.func.jvp(lambda x: rms_norm(x, torch.ones(8)), (x,), (x,))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens: int) -> None:
    moe = layer()
    x = torch.randn(num_tokens, 8, requires_grad=True)
    out = moe(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert all(value.grad is not None for value in (x, *moe.parameters()))


def test_shapes_on_the_meta_device() -> None:
    moe = MixtureOfExperts(Router(8, RouterRule(4, 2), device="meta"), Experts(4, 8, 6, device="meta"))
    assert moe(torch.randn(2, 3, 8, device="meta")).shape == (2, 3, 8)


def test_dtypes_that_differ() -> None:
    moe = layer()
    x = torch.randn(3, 8)
    with pytest.raises(ShapeError, match=r"x is torch.bfloat16, and the experts are torch.float32\. Cast one of them"):
        moe(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert moe(x).dtype == torch.bfloat16
    # The router's own dtype may be another.
    moe.router.bfloat16()
    assert moe(x).dtype == torch.float32
    with pytest.raises(ShapeError, match=r"tokens have shape \(\)"):
        moe(torch.tensor(1.0))
