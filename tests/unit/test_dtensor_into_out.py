"""What pointwise operators write to `out`, however operands and `out` lie; nothing is gathered where they lie alike."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import CommDebugMode, Shard, distribute_tensor
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads
from tests.cases.shardings import check, normal

X, Y = normal(5, 3), normal(5, 3, seed=1)

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "maximum": torch.maximum,
    "add": lambda x, y, out: torch.add(x, y, alpha=2, out=out),
    "mul": torch.mul,
    "a row": lambda x, y, out: torch.minimum(x, y[0], out=out),
    "a number": lambda x, y, out: torch.pow(x, 2, out=out),
    "three": lambda x, y, out: torch.addcmul(x, y, y, value=0.5, out=out),
    "an operand": lambda x, y, out: torch.sub(out, y, out=out),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_values_however_they_lie(name: str) -> None:
    def written(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        assert OPERATORS[name](x, y, out=out) is out
        return out

    check(written, normal(5, 3, seed=4), X, Y)


def test_nothing_is_gathered_where_they_lie_alike() -> None:
    def main() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x, y = (distribute_tensor(each, mesh, [Shard(0)]) for each in (X, Y))
        with warnings.catch_warnings(), CommDebugMode() as counts:
            warnings.simplefilter("error")
            torch.maximum(x, y, out=x)
        assert not counts.get_total_counts()
        assert torch.equal(x.full_tensor(), torch.maximum(X, Y))

    run_threads(2, main)


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_a_plain_tensor_gets_the_whole() -> None:
    def main() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x, y = distribute_tensor(X, mesh, [Shard(0)]), distribute_tensor(Y, mesh, [Shard(1)])
        out = torch.empty_like(X)
        assert torch.maximum(x, y, out=out) is out
        assert torch.equal(out, torch.maximum(X, Y))

    run_threads(2, main)


def test_dtypes_that_out_cannot_have_are_refused_as_of_plain_tensors() -> None:
    def main() -> None:
        mesh = disttrain.init_device_mesh("cpu", (2,))
        x, counts = distribute_tensor(X, mesh, [Shard(0)]), distribute_tensor(X.long(), mesh, [Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError, match="can't be cast"):
                torch.add(x, x, out=counts)
        narrow = distribute_tensor(X.float(), mesh, [Shard(0)])
        assert torch.equal(torch.add(x, x, out=narrow).full_tensor(), (2 * X).float())

    run_threads(2, main)


@pytest.mark.parametrize("options", [{"foreach": False, "amsgrad": True}, {"foreach": False}])
def test_optimizers_that_write_to_out_step_on_shards(options: dict[str, Any]) -> None:
    kind: Any = torch.optim.Adam if "amsgrad" in options else torch.optim.Adamax
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()

    def trained(model: nn.Module) -> list[torch.Tensor]:
        optimizer = kind(model.parameters(), **options)
        for _ in range(3):
            model(normal(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    def main() -> None:
        model = copy.deepcopy(plain)
        for layer in model:
            fully_shard(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = trained(fully_shard(model))
        for parameter, wished in zip(found, trained(copy.deepcopy(plain)), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), wished, rtol=1e-12, atol=1e-12)

    run_threads(2, main)
