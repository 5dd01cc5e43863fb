"""What is right: a plain model for each rank, one after the other; then gradients are averaged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.fsdp2_uses.models import Owner, Part, initialised, owners, parts_of, taken_together
from tests.fsdp2_uses.programs import Program, Use
from tests.fsdp2_uses.uses import Rank

BACKWARDS = ("backward", "write_between", "input_gradients", "penalty")


class Plain(Rank):
    """A rank that computes with whole parameters."""

    is_sharded = False

    def __init__(self, program: Program, model: Part, rank: int) -> None:
        super().__init__(program, model, rank)
        self.reached: set[Part] = set()
        self.pending: dict[str, torch.Tensor] = {}
        """Gradients that are not reduced yet."""
        self.watch()

    def watch(self) -> None:
        """Be told of the sharded parts that a backward reaches."""
        for part in parts_of(self.model):
            if self._is_sharded_part(part):
                part.reached = self.reached.add
            together = taken_together(part)
            for one in together:
                one.reached = lambda _, first=together[0]: self.reached.add(first)

    def do_copy(self) -> None:
        for part in parts_of(self.model):
            part.reached = None
        super().do_copy()
        self.pending.clear()
        self.watch()

    def clear_gradients(self, set_to_none: bool = True) -> None:
        super().clear_gradients(set_to_none)
        self.pending.clear()

    def state(self) -> dict[str, Any]:
        """All parameters with their gradients."""
        found = {}
        for name, parameter in self.model.named_parameters():
            grad = None if parameter.grad is None else parameter.grad.clone()
            found[name] = parameter.detach().clone(), grad, parameter.requires_grad
        return found


class Reference:
    """All ranks."""

    def __init__(self, program: Program) -> None:
        model = initialised(program.model, program.seed)
        self.ranks = [Plain(program, copy.deepcopy(model), rank) for rank in range(program.num_ranks)]
        self.num_copies = program.mesh[0] if len(program.mesh) == 2 else 1

    def do(self, use: Use, *, is_refused: bool = False) -> list[Any]:
        """What came of it, by rank. `is_refused`: by the sharded ones, where they may."""
        for rank in self.ranks:
            rank.calls.clear()
            rank.is_refused = is_refused
        if use.name not in BACKWARDS:
            return [rank.do(use) for rank in self.ranks]
        earlier = [{name: p.grad for name, p in rank.model.named_parameters()} for rank in self.ranks]
        for rank in self.ranks:
            rank.reached.clear()
            for parameter in rank.model.parameters():
                parameter.grad = None
        results = [rank.do(use) for rank in self.ranks]
        if not is_refused:
            self._reduce(use, earlier)
        return results

    def _reduce(self, use: Use, earlier: list[dict[str, torch.Tensor | None]]) -> None:
        """Average what has come, add it to what was there."""
        taken = owners(self.ranks[0].model)
        roots = self.ranks[0].roots()
        reached = {root for root in roots if self.ranks[0].reached & set(root.modules())}
        below = {module for root in reached for module in root.modules()}
        parameters = [dict(rank.model.named_parameters()) for rank in self.ranks]
        for name, owner in taken.items():
            grads = [named[name].grad for named in parameters]
            if owner is not None:
                is_reached = owner.part in below
                own_terms = use.name == "penalty" and not is_reached
                grads = _mean(grads) if own_terms else self._averaged(name, owner, grads, is_reached=is_reached)
            for rank, named, before, grad in zip(self.ranks, parameters, earlier, grads, strict=True):
                _accumulate(rank, name, named[name], before[name], grad)

    def _averaged(
        self, name: str, owner: Owner, grads: list[torch.Tensor | None], is_reached: bool
    ) -> list[torch.Tensor | None]:
        for rank, grad in zip(self.ranks, grads, strict=True):
            if grad is not None:
                rank.pending[name] = rank.pending[name] + grad if name in rank.pending else grad
        is_summed = owner.part.sums_copies or self.num_copies == 1
        if not (owner.part.syncs and is_summed and is_reached) or name not in self.ranks[0].pending:
            return [None] * len(grads)
        return _mean([rank.pending.pop(name) for rank in self.ranks])


def _mean(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    found = [grad for grad in grads if grad is not None]
    if not found:
        return list(grads)
    mean = torch.stack([grad.double() for grad in found]).mean(0).to(found[0].dtype)
    return [mean.clone() for _ in grads]


def _accumulate(
    rank: Plain, name: str, parameter: nn.Parameter, old: torch.Tensor | None, grad: torch.Tensor | None
) -> None:
    """Add a gradient to an earlier one, as autograd does: with the parameter's hooks."""
    parameter.grad = old
    if grad is None:
        return
    hooks = rank.hooks.get(name, ())
    for told, does in hooks:
        if does == "double":
            grad = rank.doubled(told, grad)
    parameter.grad = grad if old is None else old + grad
    for told, does in hooks:
        if does != "double":
            rank.used(told, parameter, does)
