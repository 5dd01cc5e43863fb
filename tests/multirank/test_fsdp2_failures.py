"""Exceptions anywhere, values that are not numbers: whatever a bad batch does, the next iteration is a good one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.errors import CollectiveMismatchError, GroupError, ShardingError
from disttrain.testing.pytest_plugin import on_ranks
from tests.fsdp2_cases import assert_same_gradients, backward_of_both, own_rows, pair
from tests.multirank import models


@on_ranks(2)
def test_nan_of_one_rank_reaches_all_and_leaves_with_the_batch() -> None:
    model, reference = pair()
    loss = models.loss_of(model, own_rows(0))
    (loss * (torch.nan if disttrain.get_rank() == 1 else 1.0)).backward()
    for parameter in model.parameters():
        assert parameter.grad.to_local().isnan().all()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().isnan()
    model.zero_grad()
    backward_of_both(model, reference, 1)
    assert_same_gradients(model, reference)


def _forward_pre(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_forward_pre_hook(lambda *_: fail())


def _forward_post(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_forward_hook(lambda *_: fail())


def _backward_pre(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_full_backward_pre_hook(lambda *_: fail())


def _backward_post(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_full_backward_hook(lambda *_: fail())


WAYS = {
    "before forward": _forward_pre,
    "after forward": _forward_post,
    "before backward": _backward_pre,
    "after backward": _backward_post,
}

PLACES = ("", "embedding", "blocks.0", "blocks.1.down", "blocks.2", "head")


@on_ranks(2)
@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("when", list(WAYS))
def test_an_exception_anywhere_leaves_the_model_usable(when: str, checkpointed: bool | None) -> None:
    class Model(models.TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x) if checkpointed is None else checkpoint(block, x, use_reentrant=checkpointed)
            return self.head(x)

    model, reference = pair(Model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step, place in enumerate(PLACES):
        for skipped in (0, 1):
            # The second call is that of recomputation, where there is one.
            calls = []

            def fail(calls: list[int] = calls, skipped: int = skipped) -> None:
                calls.append(1)
                if len(calls) > skipped:
                    raise ArithmeticError("bad batch")

            handle = WAYS[when](model.get_submodule(place), fail)
            try:
                models.loss_of(model, own_rows(step)).backward()
                assert len(calls) <= skipped
            except ArithmeticError:
                assert len(calls) == skipped + 1
            finally:
                handle.remove()
            for optimizer in optimizers:
                optimizer.zero_grad()
            model.zero_grad()
            backward_of_both(model, reference, step)
            assert_same_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()


@on_ranks(2)
def test_a_hook_that_fails_is_not_called_for_what_is_dropped() -> None:
    model, reference = pair()
    calls: list[int] = []

    def fail(flat: torch.Tensor) -> None:
        calls.append(1)
        raise ArithmeticError("bad hook")

    model.set_all_reduce_hook(fail)
    handle = model.blocks[1].down.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        models.loss_of(model, own_rows(0)).backward()
    # The last block's reduction is under way, and forgotten by the next forward.
    handle.remove()
    models.loss_of(model, own_rows(0))
    assert calls == []
    with pytest.raises(ArithmeticError):
        models.loss_of(model, own_rows(0)).backward()
    model.set_all_reduce_hook(lambda flat: None)
    model.zero_grad()
    backward_of_both(model, reference, 1)
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_ranks_hear_of_one_that_has_written_between_forward_and_backward() -> None:
    model, _ = pair()
    loss = models.loss_of(model, own_rows(0))
    if disttrain.get_rank() == 1:
        for parameter in model.parameters():
            parameter.to_local().detach().mul_(0.9)
        with pytest.raises(ShardingError, match="have been written to since the forward"):
            loss.backward()
    else:
        with pytest.raises((CollectiveMismatchError, GroupError), match=r"rank 1 refused backward.*written to since"):
            loss.backward()
