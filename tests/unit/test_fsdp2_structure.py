"""A sharded model that has been changed: refused on all ranks at its next forward, or taken up."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import disttrain
from disttrain.dtensor import Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads

torch.manual_seed(0)
PLAIN = nn.Sequential(
    *(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)), nn.Linear(6, 6)
).double()
X = torch.randn(4, 6, dtype=torch.float64)


def sharded(**options: object) -> nn.Module:
    model = copy.deepcopy(PLAIN)
    fully_shard(model[0], **options)
    fully_shard(model[1], **options)
    return fully_shard(model, **options)


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(disttrain.get_world_size())[disttrain.get_rank()]


def swap_over(model: nn.Module) -> None:
    model[0].append(model[1].pop(2))


def new_linear() -> nn.Linear:
    return nn.Linear(6, 6).double()


def replace_by_plain(model: nn.Module) -> None:
    model[1][0].weight = nn.Parameter(model[1][0].weight.full_tensor())


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a layer of a block": (lambda m: m[0].__setitem__(2, new_linear()), "2.weight"),
    "a layer of the root": (lambda m: m.__setitem__(2, new_linear()), "2.weight"),
    "a block": (lambda m: m.__setitem__(1, nn.Sequential(new_linear())), "new parameter 1.0"),
    "a further layer": (lambda m: m[1].append(new_linear()), "new parameter 3"),
    "a parameter": (
        lambda m: m[0].register_parameter("scale", nn.Parameter(torch.ones(6).double())),
        "parameter scale",
    ),
    "one within a layer": (lambda m: setattr(m[0][0], "scale", nn.Parameter(torch.ones(6))), "parameter 0.scale"),
    "a layer taken away": (lambda m: m[0].pop(2), "2.weight is there no longer"),
    "a parameter taken away": (
        lambda m: setattr(m[0][0], "bias", None),
        "parameter 0.bias (has been removed|is there no longer)",
    ),
    "a parameter deleted": (lambda m: delattr(m[2], "bias"), "2.bias is there no longer"),
    "a layer moved": (swap_over, "2.weight is there no longer|new parameter 3"),
    "a plain parameter": (replace_by_plain, "0.weight has become a Parameter"),
    "a tie": (lambda m: setattr(m[1][2], "weight", m[1][0].weight), "2.weight has been replaced by one"),
    "a tie between blocks": (lambda m: setattr(m[2], "weight", m[1][0].weight), "2.weight has been replaced by one"),
    "a parametrization": (lambda m: nn.utils.parametrizations.weight_norm(m[0][0]), "weight is there no longer|new"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_change_is_refused_on_all_ranks(what: str) -> None:
    change, text = REFUSED[what]

    def body() -> str:
        for reshard in (None, False):
            for first in (lambda m: None, lambda m: m(own(X)), lambda m: m(own(X)).sum().backward()):
                model = sharded(reshard_after_forward=reshard)
                first(model)
                change(model)
                with pytest.raises(ShardingError, match=text):
                    model(own(X))
                # It stays so.
                with pytest.raises(ShardingError, match=text):
                    model(own(X))
        return "refused"

    assert run_threads(2, body) == ["refused"] * 2


def same_backward(model: nn.Module, plain: nn.Module) -> None:
    model.zero_grad()
    plain.zero_grad()
    for _ in range(2):
        model(own(X)).square().mean().backward()
        plain(X).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}")


def drop_block(model: nn.Module) -> None:
    model[0] = nn.Identity()


def add_block(model: nn.Module) -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    with torch.no_grad():
        block[0].weight.copy_(torch.eye(6) * 0.5)
        block[0].bias.zero_()
    model.append(fully_shard(block) if hasattr(model, "unshard") else block)


TAKEN_UP: dict[str, Callable[[nn.Module], object]] = {
    "another activation": lambda m: m[0].__setitem__(1, nn.GELU()),
    "a further one": lambda m: m[1].append(nn.Sigmoid()),
    "a buffer": lambda m: m[0].register_buffer("count", torch.zeros(1)),
    "a wrapped block": lambda m: m.__setitem__(1, checkpoint_wrapper(m[1])),
    "blocks in another order": lambda m: m.insert(0, m.pop(1)),
    "a block left out": drop_block,
    "another sharded block": add_block,
}


@pytest.mark.parametrize("what", TAKEN_UP)
def test_what_touches_no_parameter_is_taken_up(what: str) -> None:
    plains = [copy.deepcopy(PLAIN) for _ in range(2)]
    for plain in plains:
        TAKEN_UP[what](plain)

    def body() -> None:
        for first in (lambda m: None, lambda m: m(own(X)).sum().backward()):
            model = sharded()
            first(model)
            TAKEN_UP[what](model)
            same_backward(model, copy.deepcopy(plains[0]))

    run_threads(2, body)


def test_a_replaced_shard_is_trained_from_then_on() -> None:
    def body() -> None:
        for reshard in (None, True, False):
            for before in (lambda m: None, lambda m: m(own(X)), lambda m: m.set_reshard_after_backward(False)):
                model, plain = sharded(reshard_after_forward=reshard), copy.deepcopy(PLAIN)
                before(model)
                model(own(X)).sum().backward()
                value = torch.eye(6, dtype=torch.float64)
                for layer, other in ((model[1][0], plain[1][0]), (model[2], plain[2])):
                    shard = distribute_tensor(value, layer.weight.device_mesh, [Shard(0)])
                    layer.weight, other.weight = nn.Parameter(shard), nn.Parameter(value.clone())
                found = [model[2].weight, model[1][0].weight]
                same_backward(model, plain)
                assert found[0] is model[2].weight
                assert found[1] is model[1][0].weight

    run_threads(2, body)


def test_copies_notice_changes_of_their_own() -> None:
    def body() -> None:
        model = sharded()
        model(own(X))
        twin = copy.deepcopy(model)
        twin[0].append(new_linear())
        model(own(X))
        with pytest.raises(ShardingError, match="new parameter 3"):
            twin(own(X))

    run_threads(2, body)


def test_blocks_on_their_own_and_schedules_notice_changes() -> None:
    def body() -> None:
        model = sharded()
        model(own(X))
        model[0].append(new_linear())
        with pytest.raises(ShardingError, match="new parameter 3"):
            model[0](own(X))
        model = sharded()
        model.set_is_scheduled(True)
        model[0].append(new_linear())
        with pytest.raises(ShardingError, match="new parameter 3"):
            model.unshard_all()

    run_threads(2, body)


def test_parameters_that_are_left_out_of_sharding_may_stay() -> None:
    def body() -> None:
        model = copy.deepcopy(PLAIN)
        ignored = set(model[0][0].parameters())
        fully_shard(model[0], ignored_params=ignored)
        fully_shard(model)
        torch.testing.assert_close(model(X), PLAIN(X))

    run_threads(2, body)


def test_a_module_may_be_in_several_places() -> None:
    def body() -> None:
        model = copy.deepcopy(PLAIN)
        model.append(model[0])
        plain = copy.deepcopy(model)
        fully_shard(model)
        for _ in range(2):
            torch.testing.assert_close(model(X), plain(X))

    run_threads(2, body)


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Partial()])
def test_data_that_lies_otherwise_is_brought_to_lie_as_the_shard_does(placement: Placement) -> None:
    values = torch.arange(36.0).view(6, 6)

    def body() -> None:
        model = fully_shard(nn.Linear(6, 6, bias=False))
        own = model.weight
        whole = distribute_tensor(values, own.device_mesh, [Replicate()])
        own.data = whole.redistribute(placements=[placement])
        model(torch.eye(6)).sum().backward()
        assert model.weight is own
        assert own.placements == own.grad.placements == (Shard(0),)
        torch.testing.assert_close(own.full_tensor(), values)
        torch.testing.assert_close(model(torch.eye(6)), values.T)
        own.data = distribute_tensor(values[:5], own.device_mesh, [Shard(0)])
        with pytest.raises(ShardingError, match=r"has become a DTensor of shape \(5, 6\)"):
            model(torch.eye(6))

    run_threads(2, body)


def test_a_vector_of_all_parameters_may_be_written_back() -> None:
    def body() -> None:
        model = fully_shard(nn.Linear(4, 7))
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        whole = vector.full_tensor() * 2
        expected = torch.ones(1, 4) @ whole[:28].view(7, 4).T + whole[28:]
        torch.testing.assert_close(model(torch.ones(1, 4)), expected)

    run_threads(3, body)
