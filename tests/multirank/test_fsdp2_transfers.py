"""Values do not depend on the form in which parameters and gradients go over the wire, to a bit."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain import kernels
from disttrain.dtensor import DTensor, Shard
from disttrain.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, TransferCost, TransferPolicy, fully_shard
from disttrain.fsdp2.state import state_of
from disttrain.fsdp2.transfers import forms
from disttrain.process_group import Call, current_world
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.fsdp2 import SCATTER, Halved, recorded
from tests.multirank import models
from tests.surroundings.hosts_of_groups import set_spans_hosts

FORMS = {
    "in place": TransferPolicy("in_place"),
    "mixed": TransferPolicy("mixed"),
    "mixed, reduced apart": TransferPolicy("mixed", reduces_apart=True),
    "two together": TransferPolicy("flat", together=2),
    "three together, reduced apart": TransferPolicy(together=3, reduces_apart=True),
    "all together": TransferPolicy(together=99),
}
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ROUNDED = MixedPrecisionPolicy(torch.bfloat16)
GATHER = "all_gather_into_tensor"


class TwoDtypes(models.Block):
    """A block with a norm in fp64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)))


class Odd(models.TinyModel):
    """Of its blocks one is frozen, one has a frozen matrix, one is passed by, one runs twice."""

    def __init__(self) -> None:
        super().__init__(num_blocks=6)
        self.blocks[4] = TwoDtypes(7, 13)
        self.init(0)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)
        self.blocks[4].norm.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for place in (0, 1, 2, 4, 5, 0):
            x = self.blocks[place](x)
        return self.head(x)


def with_halves() -> models.TinyModel:
    model = models.TinyModel(num_blocks=5).init(0)
    for block in model.blocks[1:4]:
        block.down.__class__ = Halved
    return model


def with_float8() -> nn.Module:
    model = models.TinyModel(vocab=16, dim=16, hidden=32, num_blocks=3).init(0)
    kernels.use_float8(model, "rowwise", report=lambda _: None)
    return model


class Nested(models.TinyModel):
    """Its blocks have sharded parts."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.init(0)

    def parts(self) -> list[nn.Module]:
        return [block.up for block in self.blocks]


def trained(
    model: nn.Module, policy: TransferPolicy | None, *, rounds: bool = False, ignores: bool = False, **options: Any
) -> list[torch.Tensor]:
    """Losses, gradients and parameters of two steps, the second of them of two microbatches."""
    if ignores:
        options["ignored_params"] = {block.up.bias for block in model.blocks}
    for part in (*(model.parts() if isinstance(model, Nested) else ()), *model.blocks, model):
        fully_shard(part, transfer_policy=policy, **options)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if rounds:
        optimizer = kernels.AdamW(model.parameters(), lr=0.1)
        model.round_in_step(optimizer)
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    vocab = model.embedding.num_embeddings
    found = []
    for step in range(2):
        for micro in range(1 + step):
            model.set_requires_gradient_sync(micro == step)
            loss = models.loss_of(model, models.own_rows(models.batch(step, vocab=vocab), rank, num_ranks))
            loss.backward()
            found.append(loss.detach())
        with torch.no_grad():
            models.loss_of(model, models.batch(9, vocab=vocab))
        found += [_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(_local(p) for p in model.parameters())]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_alike(make: Any, *names: str, **options: Any) -> None:
    """Of the forms with these `names`, or of all."""
    # What has more than a few elements is large.
    forms.COPY_BYTES_PER_S = 100 / forms.HOST_COLLECTIVE_S
    whole = make()
    expected = trained(copy.deepcopy(whole), TransferPolicy("flat"), **options)
    for form in names or FORMS:
        found = trained(copy.deepcopy(whole), FORMS[form], **options)
        assert len(found) == len(expected)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), (form, place)


@pytest.mark.sweep(1)
@on_ranks(2, 4)
def test_odd_models() -> None:
    assert_alike(Odd)


# In each half there are both of those that copy nothing or little and those of a buffer, and one is reduced apart.
HALVES = (
    ("in place", "mixed, reduced apart", "two together"),
    ("mixed", "three together, reduced apart", "all together"),
)
OPTIONS = {
    "bf16": {"mp_policy": BF16},
    "offloaded": {"mp_policy": ROUNDED, "offload_policy": CPUOffloadPolicy()},
    "whole until backward": {"reshard_after_forward": False},
    "root freed, too": {"reshard_after_forward": True},
    "rounded in the optimizer's step": {"mp_policy": BF16, "rounds": True},
    "some ignored": {"ignores": True},
    "cut along other dims": {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)},
}


def assert_alike_on_threads(monkeypatch: pytest.MonkeyPatch, whole: nn.Module, *names: str, **options: Any) -> None:
    """On three ranks, since that is uneven. They are threads, in half the time: over gloo the models that are odd in
    themselves are trained, in all forms, and some of them in bfloat16."""
    monkeypatch.setattr(forms, "COPY_BYTES_PER_S", forms.COPY_BYTES_PER_S)  # put back afterwards
    run_threads(3, lambda: assert_alike(lambda: whole, *names, **options))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", OPTIONS)
def test_precision_and_memory(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    names = HALVES[list(OPTIONS).index(options) % 2]
    assert_alike_on_threads(monkeypatch, Odd(), *names, **OPTIONS[options])


def test_sharded_parts_of_sharded_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_alike_on_threads(monkeypatch, Nested())


@pytest.mark.sweep(0)
@on_ranks(4)
@pytest.mark.parametrize("after", [None, 2])
def test_copies_and_parts_kept(after: int | None) -> None:
    mesh = disttrain.init_device_mesh("cpu", (4,) if after else (2, 2))
    assert_alike(Odd, *HALVES[after is None], mesh=mesh, reshard_after_forward=after, mp_policy=BF16)


@pytest.mark.sweep(0)
@on_ranks(3)
def test_parameters_that_say_what_is_gathered_of_them() -> None:
    assert_alike(with_halves, mp_policy=BF16)


@pytest.mark.sweep(0)
@on_ranks(3)
def test_float8() -> None:
    assert_alike(with_float8, mp_policy=BF16)


@on_ranks(2)
def test_fewer_messages_between_hosts() -> None:
    """What a slow network costs is known alike on all ranks; then scales and weights are in one message, too."""
    world = current_world()
    group = world.shared_group(tuple(range(2)))
    set_spans_hosts(between=(group,))
    group.transfer_cost = TransferCost(0.01, 1e9)
    model = with_halves()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    tokens = models.own_rows(models.batch(0), disttrain.get_rank(), 2)
    for _ in range(2):
        with recorded() as names:
            models.loss_of(model, tokens).backward()
    assert names.count(GATHER) <= 5
    assert names.count(SCATTER) <= 3


@on_ranks(2)
def test_the_first_forward_measures_once_and_ranks_agree() -> None:
    world = current_world()
    group = world.shared_group(tuple(range(2)))
    set_spans_hosts(between=(group,))
    with recorded() as names:
        for _ in range(2):
            model = models.TinyModel()
            fully_shard(model)
            with torch.no_grad():
                model(models.batch(0))
    num_measured = names.count("broadcast")
    assert 2 <= num_measured <= 4
    cost = group.transfer_cost
    told: list[object] = [None, None]
    disttrain.all_gather_object(told, [cost.latency_s, cost.bytes_per_s])
    assert told[0] == told[1]
    assert cost.latency_s > 0
    assert cost.bytes_per_s > 0


@on_ranks(2)
def test_what_is_set_later_is_planned_anew() -> None:
    whole = models.TinyModel().init(0)
    model = copy.deepcopy(whole)
    for block in model.blocks:
        fully_shard(block, transfer_policy=TransferPolicy(together=3))
    fully_shard(model)
    tokens = models.own_rows(models.batch(0), disttrain.get_rank(), 2)
    default = current_world().default_group

    def counted() -> tuple[int, set[str]]:
        calls: list[Call] = []
        observer = SimpleNamespace(enqueued=calls.append, completed=lambda *_: None)
        current_world().add_observer(observer)
        models.loss_of(model, tokens).backward()
        current_world().remove_observer(observer)
        scatters = [call for call in calls if call.operation == SCATTER]
        return len(scatters), {call.group.group_name for call in scatters}

    assert counted() == (2, {default.group_name})
    model.set_separate_reduce_scatter_group()
    num_calls, names = counted()
    assert num_calls == 2
    assert default.group_name not in names
    model.set_separate_reduce_scatter_group(enable=False)
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[2]])
    assert counted() == (4, {default.group_name})
    models.loss_of(whole, models.batch(0)).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), 3 * other.grad)


class OnTwoMeshes(nn.Module):
    """Two matrices of one dtype, which lie on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8, bias=False)
        self.own = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x).relu())


@on_ranks(4)
def test_what_lies_on_other_ranks_is_reduced_apart() -> None:
    torch.manual_seed(0)
    model = OnTwoMeshes()
    whole = copy.deepcopy(model)
    others = SimpleNamespace(mesh=disttrain.init_device_mesh("cpu", (2, 2)))

    def place(parameter: nn.Parameter) -> Any:
        return SimpleNamespace(placement=Shard(0), mesh_info=others) if parameter is model.own.weight else None

    fully_shard(model, shard_placement_fn=place)
    x = torch.randn(8, 8)
    model(x.chunk(4)[disttrain.get_rank()]).square().mean().backward()
    whole(x).square().mean().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


class Again(models.TinyModel):
    """Its blocks run twice in a row, or are computed again before their backward."""

    is_checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.is_checkpointed else block(block(x))
        return self.head(x)


@on_ranks(2)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_is_gathered_together_is_not_gathered_again_for_others(is_checkpointed: bool) -> None:
    model = Again(num_blocks=12).init(0)
    model.is_checkpointed = is_checkpointed
    for block in model.blocks:
        fully_shard(block, transfer_policy=TransferPolicy(together=3))
    fully_shard(model)
    groups = [group for block in model.blocks for group in state_of(block).groups]
    found: list[int] = []

    def count(*_: object) -> None:
        found.append(sum(group.state.is_unsharded for group in groups))

    for block in model.blocks:
        block.up.register_forward_hook(count)
        block.up.register_full_backward_hook(count)
    for _ in range(2):
        models.loss_of(model, models.own_rows(models.batch(0), disttrain.get_rank(), 2)).backward()
    assert max(found) <= 3


@on_ranks(2)
def test_what_is_set_for_a_schedule_is_planned_anew() -> None:
    model = models.TinyModel().init(0)
    fully_shard(model)
    model.set_is_scheduled(True)
    model.set_separate_reduce_scatter_group()
    model.unshard_all()
    assert all(group.reduced_apart is not None for group in state_of(model).groups)
    model.reshard_all()


class Chosen(nn.Module):
    """Computes with some of its matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.chosen = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((self.matrices[place](x) for place in self.chosen), torch.zeros(()))


@on_ranks(4)
@pytest.mark.parametrize("are_apart", [False, True])
def test_what_a_backward_does_not_reach_keeps_what_earlier_ones_have_left_for_copies(are_apart: bool) -> None:
    torch.manual_seed(0)
    model = Chosen()
    whole = copy.deepcopy(model)
    mesh = disttrain.init_device_mesh("cpu", (2, 2))
    for matrix in model.matrices if are_apart else ():
        fully_shard(matrix, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(8, 4)
    for is_last, chosen in ((False, (2,)), (True, (1, 0))):
        model.chosen = whole.chosen = chosen
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        model(x.chunk(4)[disttrain.get_rank()]).square().mean().backward()
        whole(x).square().mean().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
