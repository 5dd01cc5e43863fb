"""One call that has a model's experts computed by grouped products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import nn

from disttrain.console import write
from disttrain.experts.expert_layer import ExpertLayer
from disttrain.experts.models.finding import Finding, found, looks_like_experts
from disttrain.experts.models.unusual import what_is_unusual


class Taken(NamedTuple):
    """The module called `name`, of the class `what`, computes its experts by grouped products now."""

    name: str
    what: str


class Left(NamedTuple):
    """The module called `name` looks like experts and stays as it is, and why."""

    name: str
    why: str


class Adopted(NamedTuple):
    """All that `use_experts` took, and what it left."""

    taken: tuple[Taken, ...]
    left: tuple[Left, ...]


def use_experts(model: nn.Module, report: Callable[[str], None] = write) -> Adopted:
    """Let `model`, which stays the same object with the same parameters and names, compute its experts by grouped
    products: no loop over experts, and no word of the host.

    Taken are modules whose weights are stacked by expert (those of transformers 5, torchtitan's GroupedExperts), and
    ModuleLists of gated or plain feed-forward layers, with the block whose forward loops over them. They are found by
    their parameters' names and shapes. What they compute is found by trial: candidates run beside a small copy of the
    module in fp64, and are taken if outputs and gradients agree. Random states stay as they are, and no weight is read,
    so the model may be on the meta device. Other modules of experts are left, with the reason.

    Parameters keep their names, modules their hooks and their classes, of which they are instances still. Experts
    without a token get zeros as gradients, where a loop leaves None. The setting `experts_implementation` of
    transformers counts no more for what was taken. When a module's activation or limits are changed later, it computes
    as it did before.

    Of a list that is divided, a rank keeps its own experts alone, under their names: saves have all ranks', and each
    rank loads its own. `experts.clip_grad_norm_(model, ...)` takes the norm of all; torch's and
    `StateDictOptions(full_state_dict=True)` know this rank's only, and our optimizers' `max_norm` refuses them.

    Call it before `shard_experts`, which then has the model's experts divided among ranks, and before `fully_shard`.

    Args:    report  is given the lines that say what was taken and left; the default prints them.
    Returns: both, by the modules' names.
    """
    taken: list[Taken] = []
    left: list[Left] = []
    findings: dict[Hashable, Finding] = {}
    covered: set[nn.Module] = set()
    unknown: set[str] = set()
    # What lies inside comes first: blocks call their experts.
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, ExpertLayer) or module in covered:
            continue
        finding = found(module, findings)
        if finding is None:
            if looks_like_experts(module, name):
                left.append(Left(name, what_is_unusual(module)))
                unknown.add(name)
            continue
        covered |= {*module.modules()} if finding.kind is None else set()
        if finding.kind is None:
            left.append(Left(name, finding.why))
            continue
        finding.apply(module)
        taken.append(Taken(name, type(module).__name__))
    left = [each for each in left if not any(_is_within(each.name, other.name) for other in taken)]
    named_left = [each.name for each in left if each.name not in unknown]
    left = [
        each
        for each in left
        if each.name not in unknown
        or not (
            any(_is_within(each.name, name) for name in named_left)
            or any(each.name.startswith(f"{name}.") for name in unknown)
        )
    ]
    counts = Counter(each.what for each in taken)
    lines = ", ".join(f"{count} x {what}" for what, count in sorted(counts.items())) or "nothing"
    report(f"use_experts: {type(model).__name__}: {lines}")
    for each in left:
        report(f"use_experts: {each.name or type(model).__name__} stays as it is: {each.why}")
    return Adopted(tuple(taken[::-1]), tuple(left[::-1]))


def _is_within(first: str, second: str) -> bool:
    """True if of two names of modules one is the other's, or inside it."""
    return any(
        not outer or inner == outer or inner.startswith(f"{outer}.")
        for outer, inner in ((first, second), (second, first))
    )
