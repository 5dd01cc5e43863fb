"""Hooks on sharded parameters: called with what has been reduced, so that an optimizer may step within the backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import LayoutError, ShardingError
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from disttrain.fsdp2.grads.reduced import to_host
from disttrain.fsdp2.state import state_of
from disttrain.fsdp2.transfers.comm import Comm
from disttrain.testing import run_threads
from tests.cases.fsdp2 import small_parts
from tests.multirank import models

PLAIN = models.TinyModel().double().init(0)


def plain_model(tied: bool = False) -> nn.Module:
    model = copy.deepcopy(PLAIN)
    if tied:
        model.embedding.weight = model.head.weight
    return model


def sharded(plain: nn.Module, **options: object) -> nn.Module:
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def own_loss(model: nn.Module, step: int) -> torch.Tensor:
    batch = models.batch(step)
    return models.loss_of(model, models.own_rows(batch, disttrain.get_rank(), disttrain.get_world_size()))


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        torch.testing.assert_close(p.full_tensor(), q, msg=lambda text, name=name: f"{name}: {text}")


def step_in_backward(model: nn.Module) -> None:
    """As torch.distributed.optim's _apply_optimizer_in_backward does it."""
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], 0.01)

        def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert not torch.is_grad_enabled()
            assert p is optimizer.param_groups[0]["params"][0]
            optimizer.step()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("options", ["plain", "kept", "copies", "offloaded", "early", "tied", "factor"])
def test_an_optimizer_may_step_within_the_backward(options: str) -> None:
    plain = plain_model(options == "tied")

    def body() -> None:
        reference = copy.deepcopy(plain)
        mesh = disttrain.init_device_mesh("cpu", (2, 2) if options == "copies" else (4,))
        policies = {"offload_policy": CPUOffloadPolicy()} if options == "offloaded" else {}
        model = sharded(plain, mesh=mesh, reshard_after_forward=options != "kept", **policies)
        if options == "factor":
            model.set_reduce_scatter_divide_factor(4.0)
            model.set_force_sum_reduction_for_comms(True)
        for one in (model, reference):
            step_in_backward(one)
        for step in range(3):
            own_loss(model, step).backward()
            models.loss_of(reference, models.batch(step)).backward()
            assert_same(model, reference)
        assert all(p.grad is None for p in model.parameters())

    with small_parts(1 if options == "early" else 2**20):
        run_threads(4, body)


def test_gradients_are_reduced_once_and_hooks_are_called_once_for_that() -> None:
    def body() -> None:
        model, calls = sharded(plain_model()), []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name: calls.append((name, "grad", grad.placements)))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: calls.append((name, "sum", p.grad.placements))
            )
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            own_loss(model, 0).backward()
            assert bool(calls) == is_last
        names = [name for name, _ in model.named_parameters()]
        assert sorted((name, kind) for name, kind, _ in calls) == sorted((n, k) for n in names for k in ("grad", "sum"))
        seen = [(name, kind) for name, kind, _ in calls]
        assert all(seen.index((name, "grad")) < seen.index((name, "sum")) for name in names)
        # Blocks are reduced as their backwards end, the root last.
        first = [name.split(".")[1] for name, kind, _ in calls if name.startswith("blocks") and kind == "sum"]
        assert first == sorted(first, reverse=True)
        assert not calls[-1][0].startswith("blocks")
        assert {placements for _, _, placements in calls} == {model.head.weight.placements}

    run_threads(2, body)


def test_a_hook_finds_the_gradients_of_what_is_reduced_together() -> None:
    plain = plain_model()

    def body() -> None:
        reference = copy.deepcopy(plain)
        model = sharded(plain)
        for one in (model, reference):
            optimizer = torch.optim.SGD(one.parameters(), 0.5)
            # Backward comes to the embedding last: all gradients are there.
            one.embedding.weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        own_loss(model, 0).backward()
        models.loss_of(reference, models.batch(0)).backward()
        assert_same(model, reference)

    run_threads(2, body)


def clear_once(parameter: torch.Tensor) -> None:
    def clear(grad: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return torch.zeros_like(grad)

    handle = parameter.register_hook(clear)


def test_a_hook_replaces_the_gradient_before_it_is_added() -> None:
    def body() -> None:
        plain = plain_model()
        model = sharded(plain)
        for one in (model, plain):
            for parameter in one.parameters():
                parameter.register_hook(lambda grad: grad * 3)
                parameter.register_hook(lambda grad: grad.clamp(-0.02, 0.02) if grad.ndim == 2 else None)
            # A norm over all ranks; what comes of it may lie anyhow.
            one.head.weight.register_hook(lambda grad: grad / grad.norm())
            one.embedding.weight.register_hook(
                lambda grad: (
                    grad.redistribute(placements=[disttrain.dtensor.Replicate()]) if isinstance(grad, DTensor) else grad
                )
            )
            clear_once(one.blocks[0].up.bias)
        for step in range(2):
            own_loss(model, step).backward()
            models.loss_of(plain, models.batch(step)).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")

    run_threads(2, body)


def test_what_a_hook_gives_must_be_a_gradient() -> None:
    def body() -> None:
        for wrong in (lambda grad: grad.to_local(), lambda grad: grad.float(), lambda grad: grad[:1]):
            model = sharded(plain_model())
            handle = model.head.weight.register_hook(wrong)
            with pytest.raises((ShardingError, LayoutError), match="register_hook: a hook"):
                own_loss(model, 0).backward()
            handle.remove()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            model.zero_grad()
            plain = plain_model()
            own_loss(model, 0).backward()
            models.loss_of(plain, models.batch(0)).backward()
            torch.testing.assert_close(model.head.weight.grad.full_tensor(), plain.head.weight.grad)

    run_threads(2, body)


def test_hooks_see_the_parameters_own_dtype_and_device() -> None:
    def body() -> None:
        seen = set()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(plain_model(), mp_policy=policy)
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: seen.add(grad.dtype))
            parameter.register_post_accumulate_grad_hook(lambda p: seen.add(p.grad.to_local().dtype))
        own_loss(model, 0).backward()
        assert seen == {torch.float64}

    run_threads(2, body)


def test_averages_that_wait_for_the_copies_are_no_gradients_yet() -> None:
    def body() -> None:
        plain, calls = plain_model(), []
        model = sharded(plain, mesh=disttrain.init_device_mesh("cpu", (2, 2)))
        for one in (model, plain):
            one.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p) if p.ndim else None)
        model.set_requires_all_reduce(False)
        own_loss(model, 0).backward()
        assert calls == []
        model.set_requires_all_reduce(True)
        own_loss(model, 1).backward()
        assert len(calls) == 1
        assert calls[0] is model.head.weight

    run_threads(4, body)


def test_a_schedule_hands_gradients_out_at_its_end() -> None:
    def body() -> None:
        plain = plain_model()
        model = sharded(plain)
        for one in (model, plain):
            step_in_backward(one)
        model.set_is_scheduled(True)
        for step in range(2):
            model.unshard_all()
            own_loss(model, step).backward()
            model.reshard_all()
            model.reduce_grads()
            model.finish_grads()
            models.loss_of(plain, models.batch(step)).backward()
            assert_same(model, plain)

    run_threads(2, body)


class Waited:
    def synchronize(self) -> None:
        """As an event that has come."""


def test_without_a_hook_of_the_users_nothing_waits_for_gradients_on_their_way_to_the_host() -> None:
    def body() -> None:
        model = sharded(plain_model(), offload_policy=CPUOffloadPolicy())
        group = state_of(model.blocks[0]).groups[0]
        shards, comm = [param.sharded for param in group.params], Comm(torch.device("cpu"))
        for is_hooked in (False, True):
            if is_hooked:
                handle = shards[0].register_post_accumulate_grad_hook(lambda p: None)
            comm.uploaded = Waited()
            to_host(torch.zeros(4), group.params, comm, is_pinned=False)
            assert (comm.uploaded is None) == is_hooked
        handle.remove()

    run_threads(2, body)


@pytest.mark.parametrize("syncs_last", [False, True])
def test_a_hook_of_several_parameters_is_called_once_with_all_gradients(syncs_last: bool) -> None:
    def body() -> None:
        model, calls = sharded(plain_model()), []
        named = list(model.named_parameters())
        torch.autograd.graph.register_multi_grad_hook([parameter for _, parameter in named], calls.append)
        for step in range(2):
            if syncs_last:
                model.set_requires_gradient_sync(False)
                own_loss(model, step).backward()
                model.set_requires_gradient_sync(True)
            model.zero_grad()
            own_loss(model, step).backward()
            assert len(calls) == 1 + step
            for (name, parameter), grad in zip(named, calls[-1], strict=True):
                torch.testing.assert_close(grad.full_tensor(), parameter.grad.full_tensor(), msg=name)
        model.head.requires_grad_(False)
        own_loss(model, 0).backward()
        assert [grad is None for grad in calls[-1]] == [p is model.head.weight for _, p in named]

    run_threads(2, body)


def test_hooks_that_were_there_before_sharding_are_the_shards() -> None:
    plain = plain_model()

    def body() -> None:
        model, reference = copy.deepcopy(plain), copy.deepcopy(plain)
        calls: list[str] = []
        handles = []
        for one in (model, reference):
            for name, parameter in one.named_parameters():
                handles.append(parameter.register_hook(lambda grad: grad * 2))
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for is_hooked in (True, False):
            own_loss(model, 0).backward()
            assert sorted(calls) == sorted(name for name, _ in model.named_parameters())
            calls.clear()
            models.loss_of(reference, models.batch(0)).backward()
            calls.clear()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
            if is_hooked:
                for handle in handles:
                    handle.remove()

    run_threads(2, body)
