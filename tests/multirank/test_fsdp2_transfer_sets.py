"""Modules that are gathered and reduced together, and some that have no part in it."""

from __future__ import annotations

import copy

import pytest
import torch

import disttrain
from disttrain.fsdp2 import TransferCost, TransferPolicy
from disttrain.fsdp2.state import state_of
from disttrain.fsdp2.transfers import forms
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2 import SCATTER, assert_same_gradients, own_rows, pair, recorded, sharded
from tests.multirank import models
from tests.surroundings.hosts_of_groups import set_spans_hosts


class WithFrozen(models.TinyModel):
    """Block 4 is frozen, and computes without gradients what block 5 is given."""

    def __init__(self) -> None:
        super().__init__(num_blocks=6)
        self.blocks[4].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[:4]:
            x = block(x)
        with torch.no_grad():
            y = self.blocks[4](x)
        return self.head(self.blocks[5](x + y))


@on_ranks(2)
def test_a_set_does_not_wait_for_what_is_frozen() -> None:
    model, reference = pair(WithFrozen, transfer_policy=TransferPolicy(together=3))
    found: dict[int, int] = {}
    with recorded() as names:
        for place in (5, 1):
            model.blocks[place].up.register_full_backward_hook(
                lambda *_, place=place: found.update({place: names.count(SCATTER)})
            )
        models.loss_of(model, own_rows(0)).backward()
    models.loss_of(reference, models.batch(0)).backward()
    assert_same_gradients(model, reference)
    assert found[1] - found[5] == 1


@on_ranks(2)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_module_that_is_called_alone_leaves_the_others_sharded(has_gradients: bool) -> None:
    model, reference = pair(transfer_policy=TransferPolicy(together=3))
    models.loss_of(model, own_rows(0)).backward()
    model.zero_grad()
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).double()
    others = [group for place in (0, 2) for group in state_of(model.blocks[place]).groups]
    with torch.set_grad_enabled(has_gradients), recorded() as names:
        y = model.blocks[1](x)
        assert not any(group.state.is_unsharded for group in others)
    assert names == ["all_gather_into_tensor"]
    if has_gradients:
        y.square().mean().backward()
        reference.blocks[1](x).square().mean().backward()
        assert not any(group.state.is_unsharded for group in others)
        assert_same_gradients(model, reference)


@on_ranks(4)
def test_partly_in_place_groups_are_reduced_as_one_message() -> None:
    """Shards within a host, copies between hosts: gathers are each module's, reductions those of several."""
    forms.COPY_BYTES_PER_S = 100 / forms.HOST_COLLECTIVE_S
    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    shards, copies = mesh.get_group(1), mesh.get_group(0)
    set_spans_hosts(within=(shards,), between=(copies, mesh.world.default_group))
    copies.costs_of_mesh[tuple(shards.ranks)] = None, TransferCost(1e-2, 1e9)
    whole = models.TinyModel().double().init(0)
    model = sharded(copy.deepcopy(whole), mesh=mesh, transfer_policy=TransferPolicy("mixed"))
    with recorded() as names:
        models.loss_of(model, own_rows(0)).backward()
    models.loss_of(whole, models.batch(0)).backward()
    assert_same_gradients(model, whole)
    masks = [group.in_place for block in model.blocks for group in state_of(block).groups]
    assert any(any(mask) and not all(mask) for mask in masks)
    assert f"{SCATTER}_coalesced" not in names
