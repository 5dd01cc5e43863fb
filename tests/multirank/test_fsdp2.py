"""fully_shard on real ranks, judged by the same training in a single process."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor, Shard
from disttrain.errors import ShardingError
from disttrain.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from disttrain.process_group import Call
from disttrain.testing.pytest_plugin import on_ranks
from tests.multirank import models


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    disttrain.all_reduce(total, disttrain.ReduceOp.AVG)
    return total


def own_loss(model: nn.Module, step: int) -> torch.Tensor:
    rows = models.own_rows(models.batch(step), disttrain.get_rank(), disttrain.get_world_size())
    return models.loss_of(model, rows)


def assert_same_parameters(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        torch.testing.assert_close(parameter.full_tensor(), expected.pop(name), **tolerance)
    assert not expected


class CallCounter:
    """Counts collectives by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        disttrain.current_world().add_observer(self)

    def enqueued(self, call: Call) -> None:
        self.counts[call.operation] += 1

    def completed(self, call: Call, error: Exception | None) -> None:
        """Only the beginning is counted."""


@pytest.mark.sweep(3)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("meta", "reshard"), [(False, None), (False, True), (True, False)], ids=["initialised", "freed", "meta, kept"]
)
def test_training_equals_a_single_process(meta: bool, reshard: bool | None) -> None:
    reference = models.TinyModel().init(1).double()
    if meta:
        with torch.device("meta"):
            model = models.TinyModel().double()
    else:
        model = copy.deepcopy(reference)
    sharded(model, reshard_after_forward=reshard)
    if meta:
        model.to_empty(device="cpu")
        single = models.TinyModel().double().init(5)
        reference.load_state_dict(single.state_dict())
        model.init(5)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(4):
        loss, expected = own_loss(model, step), models.loss_of(reference, models.batch(step))
        loss.backward()
        expected.backward()
        torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), rtol=1e-6, atol=1e-6)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-6, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_each_group_is_gathered_and_reduced_once() -> None:
    model = sharded(models.TinyModel().init(1))
    counter = CallCounter()
    for step in range(3):
        counter.counts.clear()
        own_loss(model, step).backward()
        # Root once; each block before forward and before backward, but for the last, whose backward follows at once.
        assert counter.counts["reduce_scatter_tensor"] == 4
        assert counter.counts["all_gather_into_tensor"] == 1 + 2 * 3
        assert sum(counter.counts.values()) == 4 + 1 + 2 * 3
    counter.counts.clear()
    with torch.no_grad():
        own_loss(model, 0)
    assert counter.counts == {"all_gather_into_tensor": 4}
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_the_next_group_is_gathered_while_this_one_computes() -> None:
    model = sharded(models.TinyModel().init(1))
    order: list[str] = []

    class Order(CallCounter):
        def enqueued(self, call: Call) -> None:
            order.append(call.operation)

    for block_number, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, number=block_number: order.append(f"compute {number}"))
    Order()
    own_loss(model, 0).backward()
    order.clear()
    own_loss(model, 1)
    gather = "all_gather_into_tensor"
    assert order == [gather, gather, gather, "compute 0", gather, "compute 1", "compute 2"]


@on_ranks(2)
def test_parameters_are_views_of_one_buffer_and_free_their_wholes() -> None:
    model = sharded(models.TinyModel().init(1))
    block = model.blocks[0]
    storages = {p.to_local().untyped_storage().data_ptr() for p in block.parameters()}
    assert len(storages) == 1
    weight = block.up.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    block.unshard()
    whole = block.up.weight
    assert not isinstance(whole, DTensor)
    assert whole.shape == weight.shape
    torch.testing.assert_close(whole, weight.full_tensor())
    block.reshard()
    assert whole.untyped_storage().nbytes() == 0
    assert block.up.weight is weight
    assert isinstance(model, FSDPModule)
    assert isinstance(model, models.TinyModel)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_inside_and_around_blocks(reentrant: bool) -> None:
    class Checkpointed(models.TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)

            def run(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
                for block in blocks:
                    x = block(x)
                return x

            x = checkpoint(self.blocks[0], x, use_reentrant=reentrant)
            x = checkpoint(run, list(self.blocks[1:]), x, use_reentrant=reentrant)
            return self.head(x)

    reference = models.TinyModel().init(1).double()
    model = Checkpointed().double()
    model.load_state_dict(reference.state_dict())
    sharded(model)
    for step in range(3):
        own_loss(model, step).backward()
        models.loss_of(reference, models.batch(step)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2, 3)
def test_gradients_accumulate_with_and_without_communication() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference))
    counter = CallCounter()
    for step in range(3):
        model.set_requires_gradient_sync(step != 1)
        own_loss(model, step).backward()
        models.loss_of(reference, models.batch(step)).backward()
    assert counter.counts["reduce_scatter_tensor"] == 2 * 4
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_mixed_precision_computes_in_one_dtype_and_reduces_in_another() -> None:
    reference = models.TinyModel().init(1)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32))
    seen: list[torch.dtype] = []
    model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.extend([args[0].dtype, output.dtype]))
    loss = own_loss(model, 0)
    loss.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    with torch.no_grad():
        assert model(models.batch(0)).dtype == torch.float32
    models.loss_of(reference, models.batch(0)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.dtype, p.grad.dtype) == (torch.float32, torch.float32)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0.05, atol=0.01)


@on_ranks(2)
def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    reference = models.TinyModel().init(1).double()
    reference.blocks[1].up.requires_grad_(False)
    model = copy.deepcopy(reference)
    for one in (model, reference):
        one.blocks[2].unused = nn.Linear(3, 2).double()
    sharded(model)
    for step in range(2):
        own_loss(model, step).backward()
        models.loss_of(reference, models.batch(step)).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_blocks_compile_without_a_graph_break_and_only_once() -> None:
    reference = models.TinyModel().init(1).double()
    model = copy.deepcopy(reference)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        fully_shard(block).compile(fullgraph=True, backend="aot_eager")
    fully_shard(model)
    for step in range(3):
        own_loss(model, step).backward()
        models.loss_of(reference, models.batch(step)).backward()
    # One graph serves all blocks, in every step.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_an_exception_in_forward_leaves_the_model_usable() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference))

    def fail(*_: object) -> None:
        raise ValueError("bad batch")

    handle = model.blocks[1].down.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="bad batch"):
        own_loss(model, 0)
    handle.remove()
    with torch.no_grad():
        for one in (model, reference):
            for parameter in one.parameters():
                parameter.mul_(0.9)
    for step in range(2):
        own_loss(model, step).backward()
        models.loss_of(reference, models.batch(step)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_an_exception_in_backward_leaves_the_model_usable() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference))

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("bad gradient")

    fails = [
        model.blocks[0].norm.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    ]
    with pytest.raises(ValueError, match="bad gradient"):
        own_loss(model, 0).backward()
    fails.pop().remove()
    model.zero_grad()
    for step in range(2):
        loss = own_loss(model, step)
        model.zero_grad()
        loss.backward()
        reference.zero_grad()
        models.loss_of(reference, models.batch(step)).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_a_forward_without_backward_sees_what_the_optimizer_wrote() -> None:
    reference = models.TinyModel().init(1).double()
    model = sharded(copy.deepcopy(reference))
    own_loss(model, 0)
    model.state_dict()
    with torch.no_grad():
        for one in (model, reference):
            for parameter in one.parameters():
                parameter.mul_(0.5)
    model.blocks[0].unshard()
    torch.testing.assert_close(mean_over_ranks(own_loss(model, 0)), models.loss_of(reference, models.batch(0)).detach())
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].reshard()
    total = own_loss(model, 0) + own_loss(model, 1)
    total.backward()
    (models.loss_of(reference, models.batch(0)) + models.loss_of(reference, models.batch(1))).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_a_module_called_twice_and_one_whose_output_is_dropped() -> None:
    class Looped(models.TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            x = self.blocks[0](self.blocks[0](x))
            self.blocks[1](x)
            return self.head(self.blocks[2](x))

    reference = Looped().init(1).double()
    model = sharded(copy.deepcopy(reference))
    for step in range(3):
        own_loss(model, step).backward()
        models.loss_of(reference, models.batch(step)).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_the_state_dict_is_sharded_and_loads_in_place_and_by_assignment() -> None:
    model = sharded(models.TinyModel().init(1))
    other = sharded(models.TinyModel().init(2))
    for assign in (False, True):
        own_loss(model, 0)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(isinstance(value, DTensor) for value in state.values())
        other.load_state_dict(state, assign=assign)
        torch.testing.assert_close(own_loss(other, 0), own_loss(model, 0))
        own_loss(other, 1).backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
        other.zero_grad()


@on_ranks(2)
def test_each_mistake_gets_one_clear_error() -> None:
    cube = disttrain.init_device_mesh("cpu", (1, 2, 1))
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    once = fully_shard(nn.Linear(2, 2))
    mistakes = [
        ("sharded already", lambda: fully_shard(once)),
        ("has no forward of its own", lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)]))),
        ("the mesh has 3 axes", lambda: fully_shard(nn.Linear(2, 2), mesh=cube)),
        ("=3 does not divide the 2 ranks", lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=3)),
        (
            r"gave Shard\(2\) for parameter",
            lambda: fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: Shard(2)),
        ),
        ("scale is a scalar", lambda: fully_shard(scalar)),
    ]
    for rule, attempt in mistakes:
        with pytest.raises(ShardingError, match=rule):
            attempt()
