"""DTensor's rules by torch's validator of strategies, and by parts on ranks: what is offered along one axis is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from disttrain.dtensor.rules import Rule, all_replicated, pointwise
from tests.dtensor_ops.infos import info_named
from tests.dtensor_ops.rules import signatures
from tests.dtensor_ops.rules.judge import NUMS_RANKS
from tests.dtensor_ops.rules.summary import Summary, judged

SAMPLED = (
    "addmv",
    "cat",
    "cumsum",
    "gather",
    "masked_fill",
    "nn.functional.embedding",
    "nn.functional.layer_norm",
    "nn.functional.mse_loss",
    "nn.functional.nll_loss",
    "scatter_add",
    "sort",
    "var",
)
"""A few of each family; `python -m tests.dtensor_ops --rules` tries them all."""


MAX_CALLS = 3
"""Of each operator."""
_SEEN: Counter[str] = Counter()
"""The calls that some test has judged."""


@pytest.fixture(scope="module", autouse=True)
def torchs_group() -> Iterator[None]:
    """The validator takes its mesh from torch.distributed."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(NUMS_RANKS))
    yield
    torch.distributed.destroy_process_group()


def judge(name: str, seen: Counter[str], num_tried: int = 0) -> Summary:
    return judged(info_named(name), num_tried, seen, MAX_CALLS)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SAMPLED)
def test_signatures_are_true(name: str) -> None:
    summary = judge(name, _SEEN)
    assert summary.wrong == []
    assert summary.num_by_ranks > summary.num_calls > 0


def test_a_wrong_rule_is_noticed_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pointwise._LINEAR, "aten.exp", ((0,),))
    wrong = [line for line in judge("exp", Counter()).wrong if line.startswith("aten.exp") and "Partial(sum)" in line]
    assert any(": ranks: " in line for line in wrong)
    assert any(": torch: " in line for line in wrong)


@pytest.mark.sweep(0)
def test_what_no_rule_offers_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "find_rule", lambda call: Rule(lambda call: [all_replicated(call)]))
    assert judge("exp", Counter(), num_tried=2).missed["aten.exp.default"] > 0
