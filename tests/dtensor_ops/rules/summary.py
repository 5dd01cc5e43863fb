"""What came of judging the rules of many operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.opinfo.core import OpInfo

from disttrain.dtensor.rules import Signature
from disttrain.errors import LayoutError
from tests.dtensor_ops.infos import title
from tests.dtensor_ops.rules.calls import MAX_CALLS, aten_calls_of
from tests.dtensor_ops.rules.judge import NUMS_RANKS, judge
from tests.dtensor_ops.rules.missed import missed


@dataclass
class Summary:
    """Counts of calls and signatures; `missed` by operator."""

    num_calls: int = 0
    num_without_rule: int = 0
    num_refused: int = 0
    num_signatures: int = 0
    num_by_ranks: int = 0
    num_by_torch: int = 0
    not_by_torch: Counter[str] = field(default_factory=Counter)
    num_untested: int = 0
    wrong: list[str] = field(default_factory=list)
    operators: set[str] = field(default_factory=set)
    num_tried: int = 0
    missed: Counter[str] = field(default_factory=Counter)

    def add(self, other: Summary) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, set):
                mine |= value
            else:
                setattr(self, name, mine + value)

    def __str__(self) -> str:
        calls = (
            f"{self.num_calls} calls of {len(self.operators)} operators have a rule, {self.num_without_rule} have none"
        )
        judged_by = f"{self.num_by_ranks} judged on ranks, {self.num_by_torch} by torch's validator"
        lines = [
            f"{calls}, {self.num_refused} are refused",
            f"{self.num_signatures} signatures: {judged_by}, {self.num_untested} by neither; {len(self.wrong)} wrong",
        ]
        lines += [f"  {count:5} not by torch: {reason}" for reason, count in self.not_by_torch.most_common()]
        if self.num_tried:
            lines.append(f"{self.num_tried} others tried, of which {self.missed.total()} would be valid as well:")
            lines += [f"  {count:5} {name}" for name, count in self.missed.most_common()]
        return "\n".join(lines)


_SEEN: Counter[str] = Counter()
"""The calls that this worker has judged: most operators are met by many OpInfos."""


def start() -> None:
    """Makes this process able to judge: torch's validator wants a process group."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(NUMS_RANKS))


def judge_new(info: OpInfo, num_tried: int) -> Summary:
    """Judges the calls of the OpInfo that this worker has not met."""
    return judged(info, num_tried, _SEEN)


def hanging(info: OpInfo, text: str) -> Summary:
    """The summary of an operator whose judge did not come back."""
    return Summary(wrong=[f"{title(info)}: {text}"])


def judged(info: OpInfo, num_tried: int, seen: Counter[str], max_calls: int = MAX_CALLS) -> Summary:
    """Judge the calls of the OpInfo, but for those `seen`; try `num_tried` signatures more."""
    summary = Summary()
    for call in aten_calls_of(info, seen, max_calls):
        try:
            verdicts = judge(call)
        except LayoutError:
            summary.num_refused += 1
            continue
        except Exception as error:  # noqa: BLE001 -- a rule that raises anything else is wrong
            summary.wrong.append(f"{call}: {type(error).__name__}: {error}")
            continue
        if verdicts is None:
            summary.num_without_rule += 1
            continue
        summary.num_calls += 1
        summary.operators.add(str(call.op))
        summary.num_signatures += len(verdicts.signatures)
        summary.num_by_ranks += verdicts.num_by_ranks
        summary.num_by_torch += verdicts.num_by_torch
        summary.not_by_torch += verdicts.not_by_torch
        summary.num_untested += len(verdicts.untested)
        summary.wrong += [f"{call}: {shown(signature)}: {who}: {why}" for signature, who, why in verdicts.wrong]
        if num_tried:
            tried, found = missed(call, list(verdicts.signatures), num_tried)
            summary.num_tried += tried
            summary.missed[str(call.op)] += len(found)
    return summary


def shown(signature: Signature) -> str:
    operands, results = [", ".join(map(repr, side)) for side in (signature.operands, signature.results)]
    return f"{operands} -> {results}"
