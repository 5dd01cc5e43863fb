"""Forwards of sharded modules that return before they have run: generators and coroutines."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads
from tests.unit.test_fsdp2_shown import own


class Layers(nn.Module):
    """Yields what each layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        x = self.first(x).tanh()
        yield x
        yield self.last(x)


class Sum(nn.Module):
    """Of all that a generator yields."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.layers(x))  # type: ignore[return-value]


class Later(nn.Linear):
    """A forward that waits to be awaited."""

    async def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


torch.manual_seed(0)
PLAIN = Sum().double()
X = torch.randn(8, 6, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(("kind", "found"), [(Layers, "generator"), (lambda: Later(6, 6), "coroutine")])
def test_a_root_refuses_what_runs_after_its_forward(kind: type[nn.Module], found: str) -> None:
    def body() -> None:
        model = fully_shard(kind())
        for context in (torch.enable_grad(), torch.no_grad()):
            with context, pytest.raises(ShardingError, match=f"returns a {found}"):
                model(torch.ones(2, 6))
        assert all(hasattr(parameter, "placements") for parameter in model.parameters())

    run_threads(2, body)


@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_generator_within_the_root_runs_in_its_forward(reshard: bool | None) -> None:
    def body() -> None:
        model, plain = copy.deepcopy(PLAIN), copy.deepcopy(PLAIN)
        fully_shard(model.layers, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(X), plain(X))
            model(own(X)).square().mean().backward()
            plain(X).square().mean().backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    run_threads(2, body)
