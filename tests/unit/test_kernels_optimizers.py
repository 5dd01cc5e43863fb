"""AdamW, Lion and SGD in one launch, judged by torch's own; with states in bf16, masters and clipping."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.errors import ShapeError
from disttrain.kernels import SGD, AdamW, Lion
from disttrain.kernels.optimizers.total_norm import total_norm
from disttrain.testing import run_threads
from tests.cases.kernels import IMPLEMENTATIONS, drawn, use_implementation
from tests.cases.optimizers import give_gradients, parameters
from tests.cases.shardings import laid_out, mesh_of

TORCHS: list[tuple[Any, Any, dict[str, Any]]] = [
    (AdamW, torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_implementation(request.param, monkeypatch)
    return str(request.param)


@pytest.mark.parametrize(("ours", "theirs", "options"), TORCHS)
def test_steps_are_torch_s(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    own, other = parameters(), parameters()
    optimizer, wished = ours(own, **options), theirs(other, **options)
    for step in range(4):
        give_gradients(own, step)
        give_gradients(other, step)
        optimizer.step()
        wished.step()
    torch.testing.assert_close(own, other)


def test_lion() -> None:
    value, average = drawn(64), torch.zeros(64, dtype=torch.float64)
    own = nn.Parameter(value.float())
    optimizer = Lion([own], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(3):
        own.grad = drawn(64, seed=step).float()
        optimizer.step()
        grad = drawn(64, seed=step)
        value = value * (1 - 0.01 * 0.1) - 0.01 * (average * 0.9 + grad * 0.1).sign()
        average = average * 0.99 + grad * 0.01
    torch.testing.assert_close(own.detach().double(), value, atol=1e-6, rtol=1e-5)


def test_gradients_are_scaled_and_clipped_in_one_step() -> None:
    own, other = parameters(), parameters()
    optimizer, wished = AdamW(own, lr=0.1, max_norm=0.5), torch.optim.AdamW(other, lr=0.1)
    for step in range(3):
        give_gradients(own, step, factor=1024.0)
        give_gradients(other, step)
        kept = own[0].grad.clone()
        optimizer.step(grad_scale=torch.tensor(1 / 1024))
        torch.nn.utils.clip_grad_norm_(other, 0.5)
        wished.step()
        assert torch.equal(own[0].grad, kept)
    torch.testing.assert_close(own, other)


def test_half_precision_parameters_are_copies_of_their_masters() -> None:
    own, other = parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    optimizer, wished = AdamW(own, lr=1e-3), torch.optim.AdamW(other, lr=1e-3)
    for step in range(4):
        give_gradients(own, step)
        for one, two in zip(own, other, strict=True):
            two.grad = one.grad.float()
        optimizer.step()
        wished.step()
    for one, two in zip(own, other, strict=True):
        torch.testing.assert_close(optimizer.state[one]["master"], two.detach())
        # Triton's interpreter cuts off where a GPU rounds.
        torch.testing.assert_close(one.detach(), optimizer.state[one]["master"].bfloat16(), rtol=2**-7, atol=0.0)


def test_bf16_is_rounded_at_random_but_right_on_average() -> None:
    """A step far below half of what bf16 tells apart: rounded to the nearest, nothing would ever move."""
    own = nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
    optimizer = SGD([own], lr=1.0, keep_master=False)
    for _ in range(32):
        own.grad = torch.full_like(own, -1e-4)
        optimizer.step()
    assert set(own.detach().unique().tolist()) <= {1 + place / 128 for place in range(8)}
    assert own.detach().double().mean().item() == pytest.approx(1 + 32e-4, rel=2e-4)


def test_states_in_bf16_follow_those_in_fp32() -> None:
    own, other = parameters(), parameters()
    optimizer, wished = AdamW(own, lr=0.01, state_dtype=torch.bfloat16), torch.optim.AdamW(other, lr=0.01)
    for step in range(8):
        give_gradients(own, step)
        give_gradients(other, step)
        optimizer.step()
        wished.step()
    assert optimizer.state[own[0]]["exp_avg_sq"].dtype is torch.bfloat16
    assert (own[4] - other[4]).norm() < 0.01 * (other[4].detach() - drawn(64, 64, seed=4).float()).norm()


def test_state_is_saved_and_loaded() -> None:
    own, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = AdamW(own, state_dtype=torch.bfloat16)
    give_gradients(own, 0)
    optimizer.step()
    again = AdamW(other, state_dtype=torch.bfloat16)
    again.load_state_dict(optimizer.state_dict())
    state = again.state[other[0]]
    assert state["exp_avg"].dtype is torch.bfloat16
    assert state["master"].dtype is torch.float32
    assert torch.equal(state["master"], optimizer.state[own[0]]["master"])


def test_what_others_write_to_a_parameter_is_not_undone_by_its_master() -> None:
    own = nn.Parameter(drawn(1000, dtype=torch.bfloat16))
    optimizer = SGD([own], lr=1e-4)
    own.grad = torch.ones_like(own)
    optimizer.step()
    master = optimizer.state[own]["master"].clone()
    loaded = own.detach().clone()
    loaded[500:] = drawn(500, seed=1, dtype=torch.bfloat16)
    nn.ParameterList([own]).load_state_dict({"0": loaded})
    own.grad.zero_()
    optimizer.step()
    assert torch.equal(own.detach()[500:], loaded[500:])
    # Elsewhere the master keeps the bits that the parameter does not show.
    kept = master.bfloat16() == loaded
    torch.testing.assert_close(optimizer.state[own]["master"][kept], master[kept], rtol=0.0, atol=0.0)


def test_a_copy_clips_as_well() -> None:
    own = nn.Parameter(torch.zeros(4))
    again = copy.deepcopy(SGD([own], lr=1.0, max_norm=1.0))
    (other,) = again.param_groups[0]["params"]
    other.grad = torch.full((4,), 8.0)
    again.step()
    torch.testing.assert_close(other.detach(), torch.full((4,), -0.5))


def test_noise_is_of_one_parameter_and_one_part() -> None:
    """Parameters that are alike, in groups or cut among ranks, are rounded apart; copies alike."""
    start, gradient = torch.ones(512, dtype=torch.bfloat16), torch.full((512,), -1e-3, dtype=torch.bfloat16)
    alike = [nn.Parameter(start.clone()) for _ in range(3)]
    optimizer = SGD([{"params": alike[:2]}, {"params": alike[2:]}], lr=1.0, keep_master=False)
    first: list[torch.Tensor] = []
    for _ in range(2):
        for one in alike:
            one.grad = gradient
        optimizer.step()
        first = first or [one.detach().clone() for one in alike]
    moved = [one.detach() > 1 for one in alike] + [one > 1 for one in first]
    for place, one in enumerate(moved):
        for other in moved[:place]:
            assert not torch.equal(one, other)


def test_parts_are_rounded_apart_and_copies_alike(implementation: str) -> None:
    if implementation == "triton":
        pytest.skip("its interpreter knows no threads")
    found: dict[int, torch.Tensor] = {}

    def body() -> None:
        mesh = mesh_of((2, 2))
        own = nn.Parameter(laid_out(torch.ones(1024, dtype=torch.bfloat16), mesh, [Shard(0), Replicate()]))
        optimizer = SGD([own], lr=1.0, keep_master=False)
        own.grad = laid_out(torch.full((1024,), -1e-3, dtype=torch.bfloat16), mesh, [Shard(0), Replicate()])
        optimizer.step()
        assert isinstance(own, DTensor)
        found[mesh.get_rank()] = own.to_local().detach()

    run_threads(4, body)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [(AdamW, torch.optim.AdamW, {}), (SGD, torch.optim.SGD, {}), (SGD, torch.optim.SGD, {"momentum": 0.9})],
)
def test_torch_s_state_is_taken(ours: Any, theirs: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Its groups have other options, and its states no step or no master."""
    own = parameters(dtype)
    before = theirs(own, lr=0.01, **options)
    give_gradients(own, 0)
    own[1].grad = None  # has no state yet
    before.step()
    others = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    after, wished = ours(own, lr=0.5, **options), theirs(others, lr=0.5, **options)
    for optimizer in (after, wished):
        optimizer.load_state_dict(before.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.01
    give_gradients(own, 1)
    give_gradients(others, 1)
    after.step()
    wished.step()
    tolerance = {} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
    torch.testing.assert_close(own, others, **tolerance)
    assert after.state[own[0]].keys() >= wished.state[others[0]].keys() - {"momentum_buffer"}


def test_options_that_only_torch_s_have_are_refused() -> None:
    own = parameters()
    theirs = torch.optim.AdamW(own, amsgrad=True)
    optimizer = AdamW(own)
    optimizer.load_state_dict(theirs.state_dict())
    give_gradients(own, 0)
    with pytest.raises(ShapeError, match="AdamW: a group has amsgrad=True"):
        optimizer.step()


def test_momentum_may_come_later() -> None:
    own, other = parameters(), parameters()
    optimizer, wished = SGD(own, lr=0.1), torch.optim.SGD(other, lr=0.1)
    for step in range(3):
        give_gradients(own, step)
        give_gradients(other, step)
        optimizer.step()
        wished.step()
        for one in (optimizer, wished):
            one.param_groups[0]["momentum"] = 0.9
    torch.testing.assert_close(own, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_norm_of_halves_is_no_half(dtype: torch.dtype) -> None:
    """In fp16 it would be infinite, and nothing would move; in bf16 it has eight bits."""
    own = nn.Parameter(torch.zeros(1000, dtype=dtype))
    optimizer = SGD([own], lr=1.0, max_norm=1.0)
    own.grad = torch.full((1000,), 6e4, dtype=dtype)
    optimizer.step(grad_scale=torch.tensor(2.0**-16))
    torch.testing.assert_close(optimizer.state[own]["master"].norm(), torch.tensor(1.0), rtol=1e-5, atol=0.0)


def test_states_in_fp64_are_left_to_torch_s_operators() -> None:
    own, other = parameters(), parameters()
    optimizer, wished = AdamW(own, lr=0.1, state_dtype=torch.float64), AdamW(other, lr=0.1)
    for step in range(2):
        give_gradients(own, step)
        give_gradients(other, step)
        with patch.dict("os.environ", {"DISTTRAIN_KERNELS": "auto"}):
            optimizer.step()
        wished.step()
    torch.testing.assert_close(own, other)


def test_the_norm_of_gradients_that_lie_in_several_ways() -> None:
    """As torch's of the whole ones."""
    wholes = [drawn(5, 6, seed=seed, dtype=torch.float32) for seed in range(5)]
    wished = torch.nn.utils.get_total_norm(wholes)

    def body() -> None:
        mesh, other = mesh_of((2, 2)), mesh_of((4,))
        placements: list[tuple[Any, list[Any]]] = [
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Shard(0), Replicate()]),
            (mesh, [Shard(0), Shard(0)]),
            (other, [Shard(1)]),
        ]
        lying = [laid_out(whole, where, how) for whole, (where, how) in zip(wholes, placements, strict=False)]
        torch.testing.assert_close(total_norm([*lying, wholes[-1]]), wished)

    run_threads(4, body)


def test_dtensors_are_updated_part_by_part(implementation: str) -> None:
    if implementation == "triton":
        pytest.skip("its interpreter knows no threads")
    whole, gradient = drawn(5, 6, dtype=torch.float32), drawn(5, 6, seed=1, dtype=torch.float32)
    plain = nn.Parameter(whole.clone())
    wished = AdamW([plain], lr=0.1, max_norm=0.1)
    for _ in range(2):
        plain.grad = gradient.clone()
        wished.step()

    def body() -> None:
        mesh = mesh_of((2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            own = nn.Parameter(laid_out(whole, mesh, [placement]))
            optimizer = AdamW([own], lr=0.1, max_norm=0.1)
            for _ in range(2):
                own.grad = laid_out(gradient, mesh, [placement])
                optimizer.step()
            assert isinstance(own, DTensor)
            assert optimizer.state[own]["exp_avg"].placements == (placement,)
            torch.testing.assert_close(own.full_tensor().detach(), plain.detach())

    run_threads(2, body)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"AdamW: state_dtype is torch.float16"):
        AdamW([nn.Parameter(torch.ones(1))], state_dtype=torch.float16)
    with pytest.raises(ShapeError, match="Lion: lr is -1"):
        Lion([nn.Parameter(torch.ones(1))], lr=-1)


def test_a_step_is_a_write_to_all_who_look() -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = SGD([parameter], lr=1.0)
    kept = parameter * parameter
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_views_of_a_cut_parameter_see_a_step() -> None:
    def on_rank() -> tuple[torch.Tensor, torch.Tensor]:
        parameter = nn.Parameter(laid_out(torch.ones(4, 3), mesh_of((2,)), [Shard(0)]))
        view = parameter.detach()[1:][0]
        optimizer = SGD([parameter], lr=0.5)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        seen = view.full_tensor().clone()
        with torch.no_grad():
            view.mul_(2)
        return seen, parameter.detach().full_tensor()

    for seen, after in run_threads(2, on_rank):
        assert torch.equal(seen, torch.full((3,), 0.5))
        assert torch.equal(after, torch.tensor([0.5, 1.0, 0.5, 0.5])[:, None].expand(4, 3))


def test_steps_are_counted_together_whoever_has_gradients() -> None:
    """One tensor holds those that are counted together, also with loads, copies and parameters without gradients."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = AdamW(parameters, lr=0.1)
    expected = [0] * 4

    def step(*indices: int) -> None:
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.ones(2) if index in indices else None
            expected[index] += index in indices
        optimizer.step()
        found = [int(optimizer.state[each]["step"]) if each in optimizer.state else 0 for each in parameters]
        assert found == expected

    for indices in [(0, 1), (0, 1), (1,), (0, 1, 2, 3), (3,), (0, 1, 2, 3)]:
        step(*indices)
    assert len({id(optimizer.state[each]["step"]._base) for each in parameters}) == 2
    saved = copy.deepcopy(optimizer.state_dict())
    step(0, 1, 2, 3)
    optimizer.load_state_dict(saved)
    expected = [count - 1 for count in expected]
    step(0, 1, 2, 3)
    optimizer = copy.deepcopy(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    step(0, 1, 2, 3)
    step(2)
    optimizer.state[parameters[0]]["step"] = torch.tensor(7.0)
    expected[0] = 7
    step(0, 1, 2, 3)
