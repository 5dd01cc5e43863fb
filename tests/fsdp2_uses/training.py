"""Uses around a step: optimizers, gradients, and when what is gathered and reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from disttrain.dtensor import DTensor
from tests.fsdp2_uses.models import owners, parts_of
from tests.fsdp2_uses.session import Compared, Session, whole_of


class Training(Session):
    """What may be done with gradients and settings."""

    def do_optimizer(self, kind: str) -> Compared:
        makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, weight_decay=0.1),
            "foreach": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3, foreach=True),
        }
        self.settle_shards()
        taken = owners(self.model)
        # Lists of plain and sharded tensors cannot be one call of foreach.
        chosen = [p for name, p in self.model.named_parameters() if kind != "foreach" or taken[name] is not None]
        if chosen:
            self.optimizers.append(makers[kind](chosen))
        return len(chosen)

    def do_step(self, which: int = 0) -> Compared:
        self.before_writing()
        if self.optimizers:
            self.optimizers[which % len(self.optimizers)].step()

    def do_zero_grad(self, set_to_none: bool = True, by: str = "model", which: int = 0) -> Compared:
        self.settle_shards()
        if by == "model":
            self.clear_gradients(set_to_none)
        elif self.optimizers:
            self.optimizers[which % len(self.optimizers)].zero_grad(set_to_none)

    def do_clip(self, norm: float) -> Compared:
        self.settle_shards()
        taken = owners(self.model)
        chosen = [p for name, p in self.model.named_parameters() if taken[name] is not None]
        if not any(p.grad is not None for p in chosen):
            return None
        total = nn.utils.clip_grad_norm_(chosen, norm)
        return total.full_tensor() if isinstance(total, DTensor) else total.clone()

    def do_scale_gradients(self, factor: float) -> Compared:
        self.settle_shards()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def do_sync(self, syncs: bool) -> Compared:
        self._set("syncs", "set_requires_gradient_sync", syncs)

    def do_sum_copies(self, sums: bool) -> Compared:
        self._set("sums_copies", "set_requires_all_reduce", sums)

    def _set(self, name: str, method: str, value: bool) -> None:
        for part in parts_of(self.model):
            setattr(part, name, value)
        for unit in self.units() if self.is_sharded else ():
            getattr(unit, method)(value)

    def do_reshard_after_forward(self, at: int, frees: bool, recurse: bool) -> Compared:
        if unit := self.unit(at):
            unit.set_reshard_after_forward(frees, recurse=recurse)

    def do_reshard_after_backward(self, at: int, frees: bool) -> Compared:
        self.keeps_after_backward |= not frees
        if unit := self.unit(at):
            unit.set_reshard_after_backward(frees)

    def do_prefetch(self, at: int, ahead: tuple[int, ...], backward: bool) -> Compared:
        if unit := self.unit(at):
            chosen = [self.unit(which) for which in ahead]
            (unit.set_modules_to_backward_prefetch if backward else unit.set_modules_to_forward_prefetch)(chosen)

    def do_mode(self, training: bool) -> Compared:
        self.model.train(training)

    def do_unshard(self, at: int, asynchronous: bool = False) -> Compared:
        self.is_unsharded = True
        if unit := self.unit(at):
            handle = unit.unshard(async_op=asynchronous)
            if handle is not None:
                handle.wait()

    def do_reshard(self, at: int) -> Compared:
        if unit := self.unit(at):
            unit.reshard()

    def do_read(self, at: int) -> Compared:
        """Values of a module's parameters while they are gathered, then of all as they lie."""
        self.settle_shards()
        units = self.units()
        if not units:
            return None
        chosen = units[at % len(units)]
        if self.is_sharded:
            chosen.unshard()
        gathered = [whole_of(parameter).double() for parameter in chosen.parameters()]
        if self.is_sharded:
            chosen.reshard()
        with torch.no_grad():
            sums = [whole_of(parameter.square().sum()) for parameter in self.model.parameters()]
        return gathered, sums
