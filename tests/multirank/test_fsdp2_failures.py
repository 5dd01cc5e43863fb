"""Exceptions anywhere, values that are not numbers: whatever a bad batch does, the next iteration is a good one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.errors import CollectiveMismatchError, GroupError, ShardingError
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2 import assert_same_gradients, backward_of_both, own_rows, pair, sharded
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


class Checkpointed(models.TinyModel):
    """`checkpointed` is whether in a reentrant way; None: not at all."""

    checkpointed: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # that of the embedding, whose input has no gradient
@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("when", list(WAYS))
def test_an_exception_anywhere_leaves_the_model_usable(when: str, checkpointed: bool | None) -> None:
    """On all ranks at once, so that no message is left: they are threads. Ranks that fail alone are processes below."""
    whole = Checkpointed().double().init(0)
    whole.checkpointed = checkpointed
    run_threads(2, fail_everywhere, when, whole)


def fail_everywhere(when: str, whole: Checkpointed) -> None:
    model, reference = sharded(copy.deepcopy(whole)), copy.deepcopy(whole)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step, place in enumerate(PLACES):
        # The second call is that of recomputation, where there is one.
        for skipped in (0,) if whole.checkpointed is None else (0, 1):
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


def _add_a_parameter(model: Any) -> None:
    model.blocks[1].down.register_parameter("extra", nn.Parameter(torch.ones(3)))


def _fail_in_forward(model: Any) -> None:
    model.blocks[1].down.register_forward_hook(lambda *_: 1 / 0)


def _fail_in_backward(model: Any) -> None:
    model.blocks[1].down.register_full_backward_hook(lambda *_: 1 / 0)


def _spoil_a_gradient(model: Any) -> None:
    model.blocks[2].down.weight.grad = torch.zeros(model.blocks[2].down.weight.shape, dtype=torch.float64)


ALONE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a new parameter": (_add_a_parameter, "rank 1 refused forward: .*a new parameter down.extra"),
    "another dtype": (
        lambda model: model.blocks[1].down.float(),
        "rank 1 refused to gather: .*have become of different dtypes: .*down.weight",
    ),
    "a plain parameter": (
        lambda model: setattr(model.blocks[1].down, "weight", nn.Parameter(torch.ones(7, 13))),
        "rank 1 refused to gather: parameter down.weight has become a Parameter",
    ),
    "a frozen layer": (lambda model: model.blocks[1].requires_grad_(False), "rank 1 reduce_scatter_tensor .* for "),
    "a layer left out": (
        lambda model: model.blocks.__delitem__(1),
        r"rank 0 .* for blocks.\d at .*rank 1 .* for |rank 1 .* for .*rank 0 .* for blocks.\d at",
    ),
    "an exception": (_fail_in_forward, "rank 1 refused forward: ZeroDivisionError"),
    "an exception in backward": (_fail_in_backward, "rank 1 refused backward: its backward pass has ended with"),
    "a gradient of another kind": (_spoil_a_gradient, "rank 1 refused backward: "),
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(ALONE))
def test_ranks_hear_of_what_one_of_them_does_alone(name: str) -> None:
    change, told = ALONE[name]
    model, reference = pair()
    backward_of_both(model, reference, 0)
    model.zero_grad()
    is_alone = disttrain.get_rank() == 1
    if is_alone:
        change(model)
    disttrain.barrier()
    began_s = time.monotonic()

    def train() -> None:
        for step in range(4):
            models.loss_of(model, own_rows(step)).backward()

    if not is_alone:
        with pytest.raises((CollectiveMismatchError, GroupError), match=f"(?s){told}"):
            train()
    else:
        with pytest.raises((ShardingError, ZeroDivisionError, CollectiveMismatchError, GroupError)):
            train()
        # Who stays, as after an exception that was caught, is not missed because it has left.
        disttrain.current_world().store.wait(["was told"], 30)
        return
    assert time.monotonic() - began_s < 40
    disttrain.current_world().store.set("was told", b"")


@on_ranks(2)
def test_a_rank_may_fail_where_nobody_waits_for_it() -> None:
    model, reference = pair()
    backward_of_both(model, reference, 0)
    model.zero_grad()
    handle = model.register_forward_hook(lambda *_: 1 / 0)
    if disttrain.get_rank() == 0:
        handle.remove()
    with torch.no_grad():
        if disttrain.get_rank() == 0:
            models.loss_of(model, own_rows(0))
        else:
            # At its end: all has been gathered.
            with pytest.raises(ZeroDivisionError):
                models.loss_of(model, own_rows(0))
            handle.remove()
            time.sleep(1)
    backward_of_both(model, reference, 1)
    reference.zero_grad()
    model.zero_grad()
    backward_of_both(model, reference, 2)
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "freed"])
def test_a_part_that_is_converted_between_forward_and_backward(keeps: bool) -> None:
    for convert in (
        lambda model: model.blocks[1].down.float(),
        lambda model: model.head.float(),
        lambda model: model.head.to("meta"),
        lambda model: setattr(model.head.weight, "data", model.head.weight.data.float()),
    ):
        model, reference = pair(reshard_after_forward=not keeps)
        loss = models.loss_of(model, own_rows(0))
        convert(model)
        with pytest.raises(ShardingError, match=r"(converted|written to) since the forward|different dtypes|on meta"):
            loss.backward()
        model.to_empty(device="cpu").double()
        model.load_state_dict(dict(pair()[0].state_dict()))
        model.zero_grad()
        backward_of_both(model, reference, 0)
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_ranks_hear_of_one_that_has_written_to_gathered_parameters() -> None:
    model, _ = pair()
    writes = disttrain.get_rank() == 1

    def write(module: nn.Module, _: object) -> None:
        with torch.no_grad():
            next(module.parameters()).mul_(0.9)

    if writes:
        model.blocks[0].register_forward_pre_hook(write)
        with pytest.raises(ShardingError, match="has been written to in its forward"):
            models.loss_of(model, own_rows(0))
    else:
        with pytest.raises((CollectiveMismatchError, GroupError), match=r"rank 1 refused forward.*been written to"):
            models.loss_of(model, own_rows(0)).backward()


@on_ranks(2)
def test_a_model_that_is_computed_again_as_a_whole_tells_of_no_failure() -> None:
    """torch leaves its second forward early, by an exception, once the backward has what it needs."""
    model, reference = pair()
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        checkpoint(model, own_rows(step), use_reentrant=False).square().mean().backward()
        reference(models.batch(step)).square().mean().backward()
        assert_same_gradients(model, reference)
    assert disttrain.group.WORLD is not None
    assert not disttrain.group.WORLD.num_refused
