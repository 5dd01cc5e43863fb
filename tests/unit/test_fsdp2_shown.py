"""What a user finds in a sharded model outside of its forward and backward: shards, whatever has happened before."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from disttrain.kernels import AdamW
from disttrain.testing import run_threads


class Model(nn.Module):
    """Two blocks, and a root with a head, which is also used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.within: Callable[[nn.Module], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.within is not None:
            self.within(self)
        return nn.functional.linear(x, self.head.weight, self.head.bias)


torch.manual_seed(0)
PLAIN = Model().double()
X = torch.randn(8, 6, dtype=torch.float64)
NAMES = [name for name, _ in PLAIN.named_parameters()]


def sharded(plain: nn.Module = PLAIN, **options: object) -> nn.Module:
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(disttrain.get_world_size())[disttrain.get_rank()]


def assert_shards(model: nn.Module) -> None:
    found = dict(model.named_parameters())
    assert list(found) == NAMES
    assert all(type(p.data) is DTensor and p is not None for p in found.values())
    assert all(type(value) is DTensor for value in model.state_dict().values())
    assert isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0][0].weight, DTensor)


def assert_trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer does to the model what one does to the same model whole."""
    plain = copy.deepcopy(PLAIN)
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    model.zero_grad()
    for _ in range(2):
        for one, rows, by in ((model, own(X), optimizer), (plain, X, reference)):
            one(rows).square().mean().backward()
            by.step()
            by.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, msg=lambda text, name=name: f"{name}: {text}")


def fail(*_: object) -> None:
    raise ValueError("as asked")


def no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        model(own(X))


def fails_in_forward(model: nn.Module) -> None:
    model.within = fail
    with pytest.raises(ValueError, match="as asked"):
        model(own(X))
    model.within = None


def fails_before_forward(model: nn.Module) -> None:
    handle = model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ValueError, match="as asked"):
        model(own(X))
    handle.remove()


def fails_in_backward(model: nn.Module) -> None:
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    loss = model(own(X)).square().mean()
    handle.remove()
    with pytest.raises(ValueError, match="as asked"):
        loss.backward()


def keeps_after_backward(model: nn.Module) -> None:
    model.set_reshard_after_backward(False)
    model(own(X)).square().mean().backward()
    model.set_reshard_after_backward(True)


def runs_a_block(model: nn.Module) -> None:
    model(own(X))
    model.blocks[1](own(X))


def runs_a_method(model: nn.Module) -> None:
    register_fsdp_forward_method(model, "forward")
    model.forward(own(X))


def unshards_ahead(model: nn.Module) -> None:
    model.unshard()
    model.unshard(async_op=True)
    model(own(X)).sum().backward()


def recomputes(model: nn.Module) -> None:
    checkpoint(model, own(X), use_reentrant=False).sum().backward()


BEFORE = [
    lambda model: model(own(X)),
    lambda model: model(own(X)).sum().backward(),
    lambda model: model.blocks[0](own(X)).sum().backward(),
    lambda model: copy.deepcopy(model)(own(X)),
    no_grad,
    fails_in_forward,
    fails_before_forward,
    fails_in_backward,
    keeps_after_backward,
    runs_a_block,
    runs_a_method,
    unshards_ahead,
    recomputes,
]


@pytest.mark.parametrize("reshard", [None, True, False, 1])
def test_parameters_are_shards_whatever_came_before(reshard: bool | None) -> None:
    def body() -> None:
        for before in BEFORE:
            model = sharded(reshard_after_forward=reshard)
            before(model)
            assert_shards(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            assert_trains(model, optimizer)
            assert_shards(model)

    run_threads(2, body)


def test_what_is_written_between_forward_and_backward_is_there_afterwards() -> None:
    def body() -> None:
        model, plain = sharded(), copy.deepcopy(PLAIN)
        for one, rows in ((model, own(X)), (plain, X)):
            out = one(rows)
            one.load_state_dict({name: value * 2 for name, value in one.state_dict().items()}, assign=True)
            if one is plain:
                continue
            with pytest.raises(ShardingError, match="have been written to"):
                out.square().mean().backward()
            one.zero_grad()
        assert_shards(model)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)
        model(own(X)).sum()
        model.apply(lambda module: nn.init.constant_(module.weight, 0.5) if isinstance(module, nn.Linear) else None)
        plain.apply(lambda module: nn.init.constant_(module.weight, 0.5) if isinstance(module, nn.Linear) else None)
        torch.testing.assert_close(model(X), plain(X))
        copied = copy.deepcopy(model)
        torch.testing.assert_close(copied(X), plain(X))

    run_threads(2, body)


def test_unshard_gathers_what_has_been_written_since_a_forward() -> None:
    def body() -> None:
        model = sharded()
        model(own(X))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                assert all(bool((p == 0.5).all()) for p in module.parameters() if not isinstance(p, DTensor))
                module.reshard()

    run_threads(2, body)


def test_gradients_are_clipped_and_cleared_while_the_next_forward_waits() -> None:
    def body() -> None:
        model = sharded()
        model(own(X)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
        out = model(own(X))
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor(), norm)
        for parameter in model.parameters():
            parameter.grad = None
        out.square().mean().backward()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor(), norm)

    run_threads(2, body)


def test_a_frozen_parameter_gets_no_gradient_from_a_backward_that_comes_later() -> None:
    def body() -> None:
        for reshard in (None, True):
            model, plain = sharded(reshard_after_forward=reshard), copy.deepcopy(PLAIN)
            for one, rows in ((model, own(X)), (plain, X)):
                out = one(rows)
                one.head.weight.requires_grad_(False)
                one.blocks[1][0].bias.requires_grad_(False)
                out.square().mean().backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                assert p.requires_grad == q.requires_grad
                if q.grad is not None:
                    torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_threads(2, body)


def test_a_module_computes_with_what_is_whole_and_its_state_dict_is_shards_meanwhile() -> None:
    def body() -> None:
        seen: list[bool] = []

        def look(model: nn.Module) -> None:
            seen.append(isinstance(model.head.weight, DTensor))
            seen.extend(type(value) is DTensor for value in model.state_dict().values())

        model = sharded()
        model.within = look
        torch.testing.assert_close(model(X), PLAIN(X))
        assert seen == [False] + [True] * len(NAMES)
        model.unshard()
        assert not isinstance(model.head.weight, DTensor)
        assert all(type(value) is DTensor for value in model.state_dict().values())
        model.within = None
        model(X)
        assert not isinstance(model.head.weight, DTensor)
        model.reshard()
        assert_shards(model)

    run_threads(2, body)


def test_a_state_dict_of_one_rank_makes_no_rank_wait() -> None:
    def body() -> None:
        model = sharded(reshard_after_forward=False)
        out = model(own(X))
        if disttrain.get_rank() == 0:
            model.state_dict()
        out.square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_threads(2, body)


def test_a_module_may_call_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = self.inner(x)
            return self.inner(self(x, depth - 1)) if depth else x

    plain = nn.Sequential(Twice(), nn.Linear(6, 6)).double()
    plain(X).square().mean().backward()

    def body() -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        fully_shard(model[0])
        fully_shard(model)
        model(own(X)).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_threads(2, body)


def test_a_checkpoint_in_the_root_computes_again_with_what_a_block_has_kept() -> None:
    class Borrowing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return checkpoint(self.tail, x, use_reentrant=False)

        def tail(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.linear(x, self.blocks[0][0].weight).tanh()).tanh()

    plain = copy.deepcopy(PLAIN)
    plain.__class__ = Borrowing
    plain(X).square().mean().backward()

    def body() -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        model = sharded(model, reshard_after_forward=False)
        model(own(X)).square().mean().backward()
        assert_shards(model)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_threads(2, body)


def test_a_gradient_of_the_users_own_is_added_to_by_parts() -> None:
    """A sum's gradient is replicated: what is reduced is one rank's part of it."""

    def body() -> None:
        model, plain = sharded(), copy.deepcopy(PLAIN)
        for one, rows in ((model, own(X)), (plain, X)):
            one.head.weight.sum().backward()
            one(rows).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_threads(2, body)


def test_precision_is_the_modules_own_affair() -> None:
    def body() -> None:
        model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        out = model(own(X))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        assert out.dtype == torch.float32

    run_threads(2, body)


@pytest.mark.parametrize("how", ["after backward", "by hand"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_what_is_kept_is_gathered_anew_once_an_optimizer_has_stepped(how: str, is_fused: bool) -> None:
    def body() -> None:
        model, plain = sharded(), copy.deepcopy(PLAIN)
        assert isinstance(model, FSDPModule)
        kind = AdamW if is_fused else torch.optim.AdamW
        optimizers = [kind(one.parameters(), lr=0.1) for one in (model, plain)]
        if how == "after backward":
            model.set_reshard_after_backward(False)
        for _ in range(3):
            torch.testing.assert_close(model(X), plain(X))
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                one(X).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if how == "by hand":
                model.unshard()
                for optimizer, one in zip(optimizers, (model, plain), strict=True):
                    for parameter in optimizer.param_groups[0]["params"]:
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
                    one.zero_grad()

    run_threads(2, body)
