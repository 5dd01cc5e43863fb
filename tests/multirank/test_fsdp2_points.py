"""Where sharding meets autograd, memory and other ranks in ways that are easily got wrong; judged by one process."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, early, fully_shard
from disttrain.process_group import Call
from disttrain.testing.pytest_plugin import on_ranks

_spec = importlib.util.spec_from_file_location("models_of_fsdp2_point_tests", Path(__file__).parent / "models.py")
assert _spec is not None
assert _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = models
_spec.loader.exec_module(models)

SCATTER = "reduce_scatter_tensor"


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def pair(kind: type[nn.Module] = models.TinyModel, **options: object) -> tuple[nn.Module, nn.Module]:
    reference = kind().double().init(0)
    return sharded(copy.deepcopy(reference), **options), reference


def own_rows(step: int) -> torch.Tensor:
    return models.own_rows(models.batch(step), disttrain.get_rank(), disttrain.get_world_size())


def backward_of_both(model: nn.Module, reference: nn.Module, step: int) -> None:
    models.loss_of(model, own_rows(step)).backward()
    models.loss_of(reference, models.batch(step)).backward()


def assert_same_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )


class Calls:
    """The collectives that were called, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def enqueued(self, call: Call) -> None:
        self.names.append(call.operation)

    def completed(self, call: Call, error: Exception | None) -> None:
        """Only the beginning is recorded."""


@contextmanager
def recorded() -> Iterator[list[str]]:
    world, calls = disttrain.current_world(), Calls()
    world.add_observer(calls)
    try:
        yield calls.names
    finally:
        world.remove_observer(calls)


@contextmanager
def small_parts(num_bytes: int) -> Iterator[None]:
    usual, early.PART_BYTES = early.PART_BYTES, num_bytes
    try:
        yield
    finally:
        early.PART_BYTES = usual


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
def test_unused_parameters_take_part_once_for_each_backward_on_request() -> None:
    class Gated(models.Block):
        """Uses one of two experts, another one on each rank."""

        def __init__(self, dim: int, hidden: int) -> None:
            super().__init__(dim, hidden)
            self.experts = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, expert: int = 0) -> torch.Tensor:
            return super().forward(self.experts[expert](x))

    class Model(models.TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Gated(7, 13) for _ in range(3))

        def forward(self, tokens: torch.Tensor, expert: int = 0) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, expert)
            return self.head(x)

    reference = Model().double().init(0)
    model = sharded(copy.deepcopy(reference))
    model.set_reduce_scatter_unused_params(True)
    rank = disttrain.get_rank()
    for step in range(2):
        with recorded() as names:
            (model(own_rows(step), rank).square().mean()).backward()
        assert names.count(SCATTER) == 4
        for expert, rows in enumerate(models.batch(step).chunk(2)):
            (reference(rows, expert).square().mean() / 2).backward()
    for block in reference.blocks:
        block.experts[2].weight.grad = torch.zeros(7, 7).double()
    assert_same_gradients(model, reference)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sync at the end", "sync each time"])
def test_gradients_are_summed_in_the_dtype_of_their_reduction(kind: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(nn.Linear(1, 4, bias=False), mp_policy=policy)
    # 1 + 1/512 is no bfloat16.
    for micro, scale in enumerate((1.0, 2.0**-9, 2.0**-9)):
        model.set_requires_gradient_sync(micro == 2 or kind == "sync each time")
        (model(torch.full((1, 1), scale, dtype=torch.bfloat16)).float().sum()).backward()
    assert model.weight.grad.full_tensor().flatten().tolist() == [1.0 + 2.0**-8] * 4
    assert model.weight.grad.dtype == torch.float32
    # One without a gradient of its own in the last pass.
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 1)).float().sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.full((1, 1), 2.0)).float().sum().backward()
    assert model.weight.grad.full_tensor().flatten().tolist() == [2.0] * 4


@on_ranks(2)
def test_parameters_frozen_while_they_are_whole_stay_frozen() -> None:
    model, reference = pair()
    backward_of_both(model, reference, 0)
    for wanted in (False, True):
        # A forward without backward leaves the root's parameters whole.
        models.loss_of(model, own_rows(1))
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


def _forward_pre(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_forward_pre_hook(lambda *_: fail())


def _forward_post(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_forward_hook(lambda *_: fail())


def _backward_pre(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_full_backward_pre_hook(lambda *_: fail())


def _backward_post(module: nn.Module, fail: Callable[..., None]) -> object:
    return module.register_full_backward_hook(lambda *_: fail())


PLACES = ("", "embedding", "blocks.0", "blocks.1.down", "blocks.2", "head")


@on_ranks(2)
@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("when", ["_forward_pre", "_forward_post", "_backward_pre", "_backward_post"])
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

            handle = globals()[when](model.get_submodule(place), fail)
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
def test_gradients_on_their_way_are_cleared_with_the_others() -> None:
    model, reference = pair()
    model.set_is_last_backward(False)
    models.loss_of(model, own_rows(0)).backward()
    model.zero_grad()
    model.set_is_last_backward(True)
    backward_of_both(model, reference, 1)
    assert_same_gradients(model, reference)


@on_ranks(4)
def test_what_waits_for_the_copies_is_reduced_whatever_comes_last() -> None:
    class Choosing(models.TinyModel):
        def forward(self, tokens: torch.Tensor, with_all: bool = True) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks if with_all else self.blocks[:2]:
                x = block(x)
            return self.head(x) if with_all else x @ x.mT

    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    model, reference = pair(Choosing, mesh=mesh)
    for is_last, with_all in ((False, True), (False, False), (True, False)):
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        model(own_rows(0), with_all).square().mean().backward()
        reference(models.batch(0), with_all).square().mean().backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_gradients_on_the_host_accumulate() -> None:
    model, reference = pair(offload_policy=CPUOffloadPolicy())
    for step in range(3):
        model.set_is_last_backward(step == 2)
        backward_of_both(model, reference, step)
    assert_same_gradients(model, reference)


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_a_world_of_one_rank_divides_by_nothing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mesh = disttrain.init_device_mesh("cpu", shape)
    for only_sums in (False, True):
        model = nn.Linear(1, 3, bias=False)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype), reshard_after_forward=1)
        model.set_force_sum_reduction_for_comms(only_sums)
        for _ in range(2):
            model(torch.full((1, 1), 3.0)).sum().backward()
        assert model.weight.grad.to_local().flatten().tolist() == [6.0] * 3


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
        backward_of_both(twin, reference, 2)
        assert_same_gradients(twin, reference)
        reference.zero_grad()
        other.init(8)
