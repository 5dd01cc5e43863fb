"""Models that are trained in many ways, for a record of what `fully_shard` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.fsdp2 import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    TransferPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from tests.cases.fsdp2 import Halved, small_parts
from tests.fsdp2_commands.record import Commands

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x)).tanh()


class Shift(nn.Module):
    """Its backward needs no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Model(nn.Module):
    """Blocks, which may be recomputed, run twice, or raise, between what is the root's own."""

    def __init__(self, *, num_blocks: int = 3, recomputes: str = "", rounds: int = 1, raises: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(DIM, DIM, bias=False)
        self.recomputes, self.rounds, self.raises = recomputes, rounds, raises
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.rounds):
            for number, block in enumerate(self.blocks):
                if number == self.skipped:
                    continue
                x = checkpoint(block, x, use_reentrant=self.recomputes == "reentrant") if self.recomputes else block(x)
        if self.raises:
            raise KeyError("on purpose")
        return self.last(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


@contextmanager
def ranks(num_ranks: int) -> Iterator[None]:
    """A world of ranks that are not there."""
    world = World(HashStore(), 0, num_ranks, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(world):
        yield


def sharded(record: Commands, model: nn.Module, root: dict[str, object] | None = None, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **{**options, **(root or {})})
    record.name(model)
    return model


def step(model: nn.Module, record: Commands, num_steps: int = 2) -> None:
    for number in range(num_steps):
        record.say("-- step", number)
        model(torch.randn(2, DIM)).sum().backward()


def plain(record: Commands, **options: object) -> None:
    step(sharded(record, Model(), **options), record)


def kept_on_neighbours(record: Commands) -> None:
    plain(record, reshard_after_forward=2)


def precision(record: Commands) -> None:
    plain(record, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def in_place(record: Commands) -> None:
    plain(record, transfer_policy=TransferPolicy("in_place"))


def pairs(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=5), transfer_policy=TransferPolicy("flat", together=2))
    step(model, record)
    model.set_requires_gradient_sync(False)
    step(model, record, 1)
    model.set_requires_gradient_sync(True)
    model.blocks[1](torch.randn(2, DIM)).sum().backward()


def on_host(record: Commands) -> None:
    plain(record, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hybrid(record: Commands) -> None:
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ranks"))
    model = sharded(record, Model(), mesh=mesh)
    step(model, record, 1)
    model.set_requires_all_reduce(False)
    step(model, record, 1)
    model.set_requires_all_reduce(True)
    step(model, record, 1)


def accumulating(record: Commands) -> None:
    model = sharded(record, Model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    step(model, record, 1)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    step(model, record)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    step(model, record, 1)
    model.set_is_last_backward(False)
    step(model, record, 1)
    model.set_is_last_backward(True)
    step(model, record, 1)


def prefetching(record: Commands) -> None:
    model = Model(num_blocks=4)
    model.blocks[1] = Shift()
    sharded(record, model)
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch(blocks[1:3])
    blocks[3].set_modules_to_backward_prefetch(blocks[:2])
    blocks[1].set_unshard_in_backward(False)
    step(model, record)


def reduced_in_parts(record: Commands) -> None:
    with small_parts(64):
        model = sharded(record, Model(), root={"reshard_after_forward": True})
        step(model, record)
    model.set_requires_gradient_sync(False)
    step(model, record, 1)
    model.set_requires_gradient_sync(True)
    step(model, record, 1)
    model.set_reduce_scatter_unused_params(True)
    step(model, record, 1)


def unused(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=2))
    for number in range(2):
        model.skipped = number
        step(model, record, 1)
        model.set_reduce_scatter_unused_params(True)
    model.skipped = None
    step(model, record, 1)


def recomputed(record: Commands) -> None:
    step(sharded(record, Model(recomputes="plain")), record)


def recomputed_reentrant(record: Commands) -> None:
    step(sharded(record, Model(recomputes="reentrant")), record)


def twice(record: Commands) -> None:
    step(sharded(record, Model(rounds=2)), record, 3)


def path_left(record: Commands) -> None:
    model = sharded(record, Model())
    step(model, record)
    model.rounds = 2
    step(model, record)


def evaluated(record: Commands) -> None:
    model = sharded(record, Model())
    step(model, record, 1)
    for each in (torch.no_grad(), torch.inference_mode()):
        record.say("-- without gradients")
        with each:
            model(torch.randn(2, DIM))
    record.say("-- no backward follows")
    model(torch.randn(2, DIM))
    step(model, record, 1)


def by_the_user(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=2))
    handle = model.blocks[0].unshard(async_op=True)
    record.say("-- started")
    handle.wait()
    record.say("-- waited")
    step(model, record, 1)
    model.unshard()
    with torch.no_grad():
        model(torch.randn(2, DIM))
    model.first.weight.grad = None
    record.say("-- resharded by the user")
    model.reshard()
    model.blocks[1].unshard()
    with torch.no_grad():
        next(iter(model.blocks[1].norm._parameters.values())).data_ptr()
    model.blocks[1].reshard()
    model.load_state_dict(model.state_dict())


def methods(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=2))
    register_fsdp_forward_method(model, "score")
    for _ in range(2):
        record.say("-- method")
        model.score(torch.randn(2, DIM)).backward()


def children_alone(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=2))
    step(model, record, 1)
    record.say("-- a child")
    model.blocks[1](torch.randn(2, DIM, requires_grad=True)).sum().backward()
    record.say("-- a child, without gradients")
    with torch.no_grad():
        model.blocks[0](torch.randn(2, DIM))
    step(model, record, 1)


def as_a_list(record: Commands) -> None:
    model = Model(num_blocks=4)
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.blocks[2], model.last])
    fully_shard(model)
    record.name(model)
    step(model, record)


def failing(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=2))
    step(model, record, 1)
    model.raises = True
    record.say("-- raises")
    with suppress(KeyError):
        model(torch.randn(2, DIM))
    model.raises = False
    step(model, record, 1)


def failing_backward(record: Commands) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise KeyError("on purpose")

    model = sharded(record, Model(num_blocks=2))
    step(model, record, 1)
    handle = model.blocks[0].register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
    with suppress(KeyError):
        step(model, record, 1)
    handle.remove()
    step(model, record, 1)
    record.say("-- reset")
    model(torch.randn(2, DIM))
    model.reset_iter_state()


def retained(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=2))
    loss = model(torch.randn(2, DIM)).sum()
    loss.backward(retain_graph=True)
    record.say("-- once more")
    loss.backward()
    losses = [model(torch.randn(2, DIM)).sum() for _ in range(2)]
    record.say("-- of two forwards")
    losses[0].backward()
    losses[1].backward()


class Silent(nn.Module):
    """No tensor is found in what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> None:
        into.append(self.linear(x))


def silent(record: Commands) -> None:
    model = nn.Sequential(Silent(), Silent())
    fully_shard(model[0])
    fully_shard(model[1])
    record.name(model)
    for module in model:
        found: list[torch.Tensor] = []
        module(torch.randn(2, DIM), found)
        found[0].sum().backward()


def with_hooks(record: Commands) -> None:
    model = nn.Sequential(Halved(DIM, DIM), nn.Linear(DIM, DIM))
    fully_shard(model[0])
    fully_shard(model)
    record.name(model)
    step(model, record)


def given_values(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=1))
    step(model, record, 1)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, values, (torch.randn(2, DIM),)).sum()
    step(model, record, 1)


def frozen(record: Commands) -> None:
    model = sharded(record, Model(num_blocks=2))
    model.blocks[0].requires_grad_(False)
    model.first.requires_grad_(False)
    step(model, record)


def scheduled(record: Commands) -> None:
    model = sharded(
        record,
        Model(num_blocks=2),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        transfer_policy=TransferPolicy(together=2),
    )
    model.set_is_scheduled(True)
    for _ in range(2):
        record.say("-- scheduled")
        model.unshard_all()
        losses = [model(torch.randn(2, DIM)).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        model.reshard_all()
        model.reduce_grads(0.5)
        model.finish_grads()
    model.set_is_scheduled(False)
    step(model, record, 1)


SCENARIOS: tuple[Callable[[Commands], None], ...] = (
    plain,
    kept_on_neighbours,
    precision,
    in_place,
    pairs,
    on_host,
    hybrid,
    accumulating,
    prefetching,
    reduced_in_parts,
    unused,
    recomputed,
    recomputed_reentrant,
    twice,
    path_left,
    evaluated,
    by_the_user,
    methods,
    children_alone,
    as_a_list,
    failing,
    failing_backward,
    retained,
    silent,
    with_hooks,
    given_values,
    frozen,
    scheduled,
)
