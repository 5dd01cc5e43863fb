"""2:4 sparse weights: their masks, what a step does, and that training goes on from a saved state."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from disttrain.errors import ShapeError, ShardingError
from disttrain.kernels import SGD, AdamW, Sparse24, SparseLinear, use_sparse24
from disttrain.kernels.sparse24.training import mask24
from tests.cases.kernels import drawn


@given(st.lists(st.integers(-3, 3), min_size=4, max_size=4))
def test_the_two_largest_of_four_stay(values: list[int]) -> None:
    mask = mask24(torch.tensor([values], dtype=torch.float32))[0].tolist()
    order = sorted(range(4), key=lambda place: -abs(values[place]))
    assert [place for place in range(4) if mask[place]] == sorted(order[:2])


def is_sparse(weight: torch.Tensor) -> bool:
    return bool((weight.detach().unflatten(-1, (-1, 4)).ne(0).sum(-1) <= 2).all())


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 3))
    use_sparse24(model, report=lambda _: None)
    return model


def test_a_model_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 7), nn.Linear(7, 8), nn.Linear(8, 3))
    names = list(model.state_dict())
    assert [one.name for one in use_sparse24(model)] == ["0", "1"]
    assert capsys.readouterr().out.splitlines() == [
        "use_sparse24: Sequential: 2 linear layers",
        "use_sparse24: left 2: inputs are no multiples of 4",
        "use_sparse24: left 3: it is the head",
    ]
    assert isinstance(model[0], SparseLinear)
    assert list(model.state_dict()) == names


def test_a_step_is_that_of_the_dense_weight() -> None:
    model = model_of()
    dense = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    Sparse24(model, optimizer, every=2, decay=0.1)
    mask = mask24(dense)
    assert torch.equal(model[0].weight, dense * mask)
    for step in range(4):
        model(drawn(4, 8).float()).square().sum().backward()
        # What the masked weights' gradients are is what the dense weights get, and the masked ones are drawn to zero.
        dense = dense - 0.5 * (model[0].weight.grad + 0.1 * dense * ~mask)
        mask = mask24(dense) if step % 2 == 0 else mask
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(optimizer.state[model[0].weight]["dense24"], dense)
        torch.testing.assert_close(model[0].weight.detach(), dense * mask)
        assert is_sparse(model[0].weight)
        assert not is_sparse(model[3].weight)


@pytest.mark.parametrize("is_made_first", [False, True])
@pytest.mark.parametrize("num_before", [3, 4])
@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamW])
def test_training_goes_on_from_its_states(
    make: type[torch.optim.Optimizer], num_before: int, is_made_first: bool
) -> None:
    """Exactly, also where masks are not chosen just then, and where a save is loaded into what is ready to train."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            model(drawn(4, 8, seed=step).float()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = model_of()
    optimizer = make(model.parameters(), lr=0.05)
    Sparse24(model, optimizer, every=4)
    steps(model, optimizer, 0, num_before)
    assert is_sparse(model[2].weight)
    other = model_of(1)
    other_optimizer = make(other.parameters(), lr=0.05)
    if is_made_first:
        Sparse24(other, other_optimizer, every=4)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if not is_made_first:
        Sparse24(other, other_optimizer, every=4)
    for one in ((model, optimizer), (other, other_optimizer)):
        steps(*one, num_before, num_before + 6)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_scaled_gradients_decay_as_others() -> None:
    """A masked weight's decay is not scaled with the loss."""
    found = []
    for scale in (1.0, 1024.0):
        model = model_of()
        optimizer = SGD(model.parameters(), lr=0.5)
        Sparse24(model, optimizer, decay=0.1)
        (scale * model(drawn(4, 8).float()).square().sum()).backward()
        optimizer.step(grad_scale=torch.tensor(1.0 / scale))
        found.append(optimizer.state[model[0].weight]["dense24"])
    torch.testing.assert_close(*found)


def test_it_learns() -> None:
    model, x = model_of(), drawn(64, 8).float()
    target = drawn(64, 3, seed=1).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    Sparse24(model, optimizer)
    losses = []
    for _ in range(60):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_weights_without_a_gradient_are_left() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    Sparse24(model, optimizer)
    before = model[2].weight.detach().clone()
    model[0](torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(model[2].weight, before)
    assert is_sparse(model[0].weight)


def test_bad_input_is_told() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ShapeError, match="every is 0"):
        Sparse24(model, optimizer, every=0)
    with pytest.raises(ShardingError, match="no weight of the model's 0 sparse layers"):
        Sparse24(nn.Linear(4, 4), optimizer)
    Sparse24(model, optimizer)
    with pytest.raises(ShapeError, match="a closure"):
        optimizer.step(lambda: 0.0)
