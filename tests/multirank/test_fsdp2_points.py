"""Where sharding meets autograd and memory in ways that are easily got wrong; judged by one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import DisttrainError
from disttrain.fsdp2 import fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2 import assert_same_gradients, backward_of_both, own_rows, pair, sharded, small_parts
from tests.multirank import models


@on_ranks(2)
def test_storage_is_resized_and_versions_are_kept() -> None:
    model, _ = pair()
    block = model.blocks[0]
    block.unshard()
    whole = block.up.weight
    before = (whole._version, whole._cdata, whole.untyped_storage()._cdata)
    saved = whole.view(-1)
    values = saved.clone()
    block.reshard()
    assert whole.untyped_storage().nbytes() == 0
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(2.0)
    block.unshard()
    assert block.up.weight is whole
    assert (whole._version, whole._cdata, whole.untyped_storage()._cdata) == before
    # What autograd has saved sees what was gathered anew.
    assert torch.equal(saved, values * 2)


@on_ranks(2)
def test_an_output_whose_gradient_comes_after_the_modules_own() -> None:
    class Forked(models.Block):
        def __init__(self, dim: int, hidden: int) -> None:
            super().__init__(dim, hidden)
            self.side = nn.Linear(3, dim)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # The second output does not depend on x: its backward is free to run when the module's is over.
            return super().forward(x), self.side(x.new_ones(3))

    class Model(models.TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Forked(7, 13) for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, late = self.embedding(tokens), 0.0
            for block in self.blocks:
                x, side = block(x)
                late = late + side
            gate = _Late.apply(late)
            return self.head(x) * gate.sum()

    model, reference = pair(Model)
    for step in range(3):
        backward_of_both(model, reference, step)
        assert_same_gradients(model, reference)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


class _Late(torch.autograd.Function):
    """Hands on its input."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_roots_gradients_may_come_in_pieces(reentrant: bool) -> None:
    class Rooted(models.TinyModel):
        """All parameters belong to the root; each block is recomputed, and the head is used in between, too."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(self.run, block, x, use_reentrant=reentrant)
            return self.head(x)

        def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return block(x) + self.head(x).mean(-1, keepdim=True) + self.blocks[0].norm(x)

    reference = Rooted().double().init(0)
    with small_parts(1):
        model = fully_shard(copy.deepcopy(reference))
        for step in range(2):
            backward_of_both(model, reference, step)
            assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_recomputation_of_what_neighbours_keep(num_ranks: int, reentrant: bool) -> None:
    class Checkpointed(models.TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            def run(x: torch.Tensor) -> torch.Tensor:
                return self.blocks[2](self.blocks[1](x))

            x = checkpoint(self.blocks[0], self.embedding(tokens), use_reentrant=reentrant)
            return self.head(self.blocks[0](checkpoint(run, x, use_reentrant=reentrant)))

    model, reference = pair(Checkpointed, reshard_after_forward=num_ranks)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(3):
        backward_of_both(model, reference, step)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_a_graph_may_be_differentiated_twice() -> None:
    model, reference = pair()
    losses = [models.loss_of(model, own_rows(0)), models.loss_of(reference, models.batch(0))]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_parameters_frozen_while_they_are_whole_stay_frozen() -> None:
    model, reference = pair()
    backward_of_both(model, reference, 0)
    for wanted in (False, True):
        model.unshard()
        assert not isinstance(model.head.weight, DTensor)
        for one in (model, reference):
            one.head.weight.requires_grad_(wanted)
            one.blocks[1].up.requires_grad_(wanted)
            one.zero_grad()
        assert model.head.weight.requires_grad is wanted
        backward_of_both(model, reference, 2)
        assert model.head.weight.requires_grad is wanted
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_ranks_whose_input_asks_for_gradients_and_others() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(models.Block(7, 13) for _ in range(3))).double()
    model = copy.deepcopy(reference)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).double()
    for asks in (disttrain.get_rank() == 0, True, False):
        own = x.chunk(2)[disttrain.get_rank()].clone().requires_grad_(asks)
        model(own).square().mean().backward()
        reference(x).square().mean().backward()
        assert (own.grad is not None) == asks
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("option", [True, False, 1, 2])
def test_kept_whole_called_twice_frozen_and_loaded(option: bool | int) -> None:
    class Looped(models.TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x)

    model, reference = pair(Looped, reshard_after_forward=option)
    other = Looped().double().init(7)
    for micro in range(3):
        is_last = micro == 2
        model.set_reshard_after_backward(is_last)
        for one in (model, reference):
            one.blocks[micro].down.requires_grad_(False)
        backward_of_both(model, reference, micro)
    assert_same_gradients(model, reference)
    for assign in (False, True):
        model.set_reshard_after_backward(False)
        backward_of_both(model, reference, 0)
        source = sharded(copy.deepcopy(other), reshard_after_forward=option)
        model.load_state_dict(source.state_dict(), assign=assign)
        reference.load_state_dict(other.state_dict())
        model.requires_grad_(True)
        reference.requires_grad_(True)
        model.set_reshard_after_backward(True)
        model.zero_grad()
        reference.zero_grad()
        backward_of_both(model, reference, 1)
        assert_same_gradients(model, reference)
        twin = copy.deepcopy(model)
        # A copy has no gradients yet.
        reference.zero_grad()
        backward_of_both(twin, reference, 2)
        assert_same_gradients(twin, reference)
        reference.zero_grad()
        other.init(8)


@on_ranks(2)
def test_a_parameter_used_in_two_groups() -> None:
    class Borrowing(models.TinyModel):
        """The last block's input goes through the first one's weight once more."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks[:2]:
                x = block(x)
            x = x + nn.functional.linear(x, self.blocks[0].up.weight).mean(-1, keepdim=True)
            return self.head(self.blocks[2](x))

    model, reference = pair(Borrowing)
    with pytest.raises(DisttrainError, match="DTensor"):
        backward_of_both(model, reference, 0)
    model.blocks[0].set_reshard_after_forward(False)
    reference.zero_grad()
    for step in range(3):
        backward_of_both(model, reference, step)
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_a_module_that_returns_nothing() -> None:
    class Noting(models.Block):
        def forward(self, x: torch.Tensor) -> None:
            self.noted = super().forward(x)

    class Model(models.TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Noting(7, 13) for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                block(x)
                x = block.noted
            return self.head(x)

    model, reference = pair(Model)
    for step in range(2):
        backward_of_both(model, reference, step)
        assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_of_a_whole_model(reentrant: bool) -> None:
    class Model(models.TinyModel):
        def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * scale

    model, reference = pair(Model)
    for step in range(3):
        for one, rows in ((model, own_rows(step)), (reference, models.batch(step))):
            scale = torch.ones(1, requires_grad=True)
            checkpoint(one, rows, scale, use_reentrant=reentrant).square().mean().backward()
        assert_same_gradients(model, reference)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
