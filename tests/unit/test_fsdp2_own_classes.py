"""Inputs and outputs in which no tensors are found, and containers that a module writes to."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.distributions import Normal

import disttrain
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing import run_threads


class Carrier:
    """Of the user's own, with a tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, given: Carrier) -> Carrier:
        return Carrier(self.linear(given.x).tanh())


class Appends(nn.Module):
    """Puts what it computes into the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, given: list[torch.Tensor]) -> None:
        given.append(self.linear(given[-1]).tanh())


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> Normal:
        return Normal(self.linear(x), 1.0)


class Beside(nn.Module):
    """A tensor that the loss knows nothing of, and one that is not found."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.other = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Carrier]:
        return self.other(x), Carrier(self.linear(x).tanh())


class Attribute(nn.Module):
    """Keeps what it computes, and returns it without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.x = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = self.linear(x).tanh()
        return self.x.detach()


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        given: Any = [x * 1] if isinstance(self.blocks[0], Appends) else Carrier(x)
        for block in self.blocks:
            given = block(given) or given
        return given if isinstance(given, Carrier) else Carrier(sum(given))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    output = output[1] if isinstance(output, tuple) else model if torch.is_tensor(output) else output
    return -output.log_prob(x).mean() if isinstance(output, Normal) else output.x.square().mean()


@pytest.mark.parametrize("kind", ["carried", "appends", "distribution", "beside", "attribute", "carried, kept"])
def test_training_is_that_of_one_process(kind: str) -> None:
    torch.manual_seed(0)
    alone = {"distribution": Draws, "beside": Beside, "attribute": Attribute}
    plain = alone[kind]() if kind in alone else Model(Appends if kind == "appends" else Carried)
    batches = torch.randn(3, 4, 4, dtype=torch.float64)

    def body() -> None:
        reference, model = copy.deepcopy(plain), copy.deepcopy(plain)
        for block in getattr(model, "blocks", ()):
            fully_shard(block)
        fully_shard(model, reshard_after_forward=False if "kept" in kind else None)
        optimizers = [torch.optim.SGD(one.parameters(), 0.5) for one in (model, reference)]
        rank = disttrain.get_rank()
        for batch in batches:
            loss_of(model, batch[2 * rank : 2 * rank + 2]).backward()
            loss_of(reference, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)

    run_threads(2, body)


@dataclasses.dataclass
class Counted:
    x: torch.Tensor
    calls: int = 0


class Cached(nn.Module):
    """Writes to each kind of container that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: dict[str, Any], *, counted: Counted) -> torch.Tensor:
        cache["keys"].append(self.linear(x))
        cache["first"][0] = x
        del cache["old"]
        counted.calls += 1
        return torch.stack(cache["keys"]).sum(0)


@pytest.mark.parametrize("mode", ["trained", "cast"])
def test_what_a_module_writes_to_containers_reaches_the_callers(mode: str) -> None:
    def body() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mode == "cast" else None
        model = fully_shard(Cached(), mp_policy=policy)
        x = torch.ones(2, 4, requires_grad=mode == "trained")
        first = [x * 2, x * 3]
        cache = {"keys": [x * 1], "first": first, "old": x * 1}
        counted, earlier = Counted(x * 1), cache["keys"][0]
        for number in range(2):
            cache["old"] = x * 1
            with torch.set_grad_enabled(mode == "trained"):
                model(x, cache, counted=counted)
            assert len(cache["keys"]) == 2 + number
            assert counted.calls == 1 + number
            assert "old" not in cache
        # What was there is still the caller's own, in its own dtype.
        assert cache["keys"][0] is earlier
        assert cache["first"] is first
        assert first[0].tolist() == x.tolist()
        assert first[1].dtype == torch.float32

    run_threads(2, body)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_tangents_pass_what_tells_that_a_backward_is_over() -> None:
    def body() -> None:
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model = copy.deepcopy(plain)
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        torch.manual_seed(0)
        x, tangent = torch.randn(2, 3, 4, dtype=torch.float64)
        found = []
        for one in (model, plain):
            with forward_ad.dual_level():
                found.append(forward_ad.unpack_dual(one(forward_ad.make_dual(x, tangent))).tangent)
        torch.testing.assert_close(found[0], found[1])

    torch.manual_seed(1)
    run_threads(1, body)
