"""One rank's use of a model: sharded, or the plain one that it is judged by. Each use is a method, and one for both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.fsdp2 import FSDPModule
from disttrain.fsdp2.nests import for_each_tensor
from tests.fsdp2_uses.models import DIM, Part, call, owners, parts_of, sharded_parts
from tests.fsdp2_uses.programs import Program, Use

ROWS = 3
SHARED = Any
"""A plain value that is compared."""


class Planned(Exception):
    """What a program raises on purpose."""


class Session:
    """What a rank holds while a program is played."""

    is_sharded = True

    def __init__(self, program: Program, model: Part, rank: int) -> None:
        self.program = program
        self.model = model
        self.rank = rank
        self.earlier: list[Part] = []
        """Models of which a copy has taken the place."""
        self.graphs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Losses whose backward is still to come, with their inputs."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.calls: list[str] = []
        """Of hooks, since the last use."""
        self.is_unsharded = False
        """The user has gathered something, and not freed it."""

    def do(self, use: Use) -> Any:
        """Do it, and say what came of it."""
        method: Callable[..., Any] = getattr(self, f"do_{use.name}")
        return method(**use.options)

    # What uses are made of

    def inputs(self, batch: int, asks: bool = False) -> torch.Tensor:
        """This rank's rows of a batch."""
        generator = torch.Generator().manual_seed(1000 * batch + self.rank)
        return torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64).requires_grad_(asks)

    def part(self, at: int) -> Part:
        parts = parts_of(self.model)
        return parts[at % len(parts)]

    def callable_part(self, at: int) -> Part:
        """The root, or a part that may be called without it."""
        parts = sharded_parts(self.model)
        return self.model if at == 0 or not parts else parts[at % len(parts)]

    def roots(self) -> list[Part]:
        """Sharded parts that are below no other one."""
        found: list[Part] = []
        for part in parts_of(self.model):
            inner = {below for root in found for below in root.modules()}
            if part not in inner and self._is_sharded_part(part):
                found.append(part)
        return found

    def _is_sharded_part(self, part: Part) -> bool:
        return part in {owner.part for owner in owners(self.model).values() if owner is not None} or (
            part.node.shard is not None and not part.node.shard.together
        )

    def parameter(self, which: int) -> tuple[str, nn.Parameter] | None:
        named = list(self.model.named_parameters())
        return named[which % len(named)] if named else None

    def loss_of(self, part: Part, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = call(part, x).to(torch.float64)
        return output, (output.square().mean() + output.sum() * 0.1).tanh()

    def settle_shards(self) -> None:
        """Free what the user has gathered: what is written to then would be lost, by what `unshard` says."""
        if self.is_unsharded:
            for part in self.sharded_modules():
                part.reshard()
        self.is_unsharded = False

    def sharded_modules(self) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def before_writing(self) -> None:
        self.settle_shards()
        self.graphs.clear()

    # Computing

    def do_forward(self, batch: int, at: int = 0, mode: str = "train", asks: bool = False) -> SHARED:
        x = self.inputs(batch, asks and mode == "train")
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
        with context():
            output, loss = self.loss_of(self.callable_part(at), x)
        if mode == "train" and loss.requires_grad:
            self.graphs.append((loss, x))
        return [output.detach().clone(), loss.detach().clone()]

    def do_method(self, batch: int, mode: str = "train") -> SHARED:
        x = self.inputs(batch)
        with torch.set_grad_enabled(mode == "train"):
            output = self.model.extra(x if self.model.node.io != "dict" else {"x": x})
        return output.detach().double()

    def do_backward(self, which: int = 0, retain: bool = False, together: bool = False) -> SHARED:
        if not self.graphs:
            return None
        chosen = self.graphs if together else [self.graphs[which % len(self.graphs)]]
        if not retain:
            self.graphs = [graph for graph in self.graphs if not any(graph is one for one in chosen)]
        for _, x in chosen:
            x.grad = None
        torch.autograd.backward([loss for loss, _ in chosen], retain_graph=retain)
        return [None if x.grad is None else x.grad.clone() for _, x in chosen]

    def do_input_gradients(self, batch: int) -> SHARED:
        """torch.autograd.grad with regard to the inputs."""
        x = self.inputs(batch, asks=True)
        _, loss = self.loss_of(self.model, x)
        (grad,) = torch.autograd.grad(loss, x, allow_unused=True)
        return None if grad is None else grad.clone()

    def do_raise_in_forward(self, batch: int, at: int, before: bool, mode: str = "train") -> SHARED:
        part = self.part(at)
        add = part.register_forward_pre_hook if before else part.register_forward_hook
        handle = add(_raise)
        try:
            with torch.set_grad_enabled(mode == "train"):
                self.loss_of(self.model, self.inputs(batch))
        except Planned as error:
            return str(error)
        finally:
            handle.remove()
        return "not reached"

    def do_raise_in_backward(self, batch: int, at: int, before: bool) -> SHARED:
        """By the gradient of a part's inputs or outputs. What came of the gradients before is cleared."""

        def of_output(_: nn.Module, args: object, output: Any) -> None:
            _raise_at_gradient(output)

        def of_input(_: nn.Module, args: Any, kwargs: Any) -> Any:
            # The same tensor may be used elsewhere, which is no matter of this part.
            args, kwargs = for_each_tensor((args, kwargs), torch.clone)
            _raise_at_gradient((args, kwargs))
            return args, kwargs

        part = self.part(at)
        handle = (
            part.register_forward_hook(of_output)
            if before
            else part.register_forward_pre_hook(of_input, with_kwargs=True)
        )
        try:
            _, loss = self.loss_of(self.model, self.inputs(batch, asks=True))
        finally:
            handle.remove()
        result = "not reached"
        try:
            if loss.requires_grad:
                loss.backward()
        except Planned as error:
            result = str(error)
        self.clear_gradients()
        return result

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Those of all parameters, and what ranks have not reduced yet."""
        for root in self.roots():
            root.zero_grad(set_to_none)
        self.model.zero_grad(set_to_none)

    # Training

    def do_optimizer(self, kind: str) -> SHARED:
        parameters = [parameter for parameter in self.model.parameters() if parameter.numel()]
        if not parameters:
            return None
        makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, weight_decay=0.1),
        }
        self.settle_shards()
        self.optimizers.append(makers[kind]([p for p in self.model.parameters() if p.numel()]))
        return len(parameters)

    def do_step(self, which: int = 0) -> SHARED:
        self.before_writing()
        if self.optimizers:
            self.optimizers[which % len(self.optimizers)].step()

    def do_zero_grad(self, set_to_none: bool = True, by: str = "model", which: int = 0) -> SHARED:
        self.settle_shards()
        if by == "model":
            self.clear_gradients(set_to_none)
        elif self.optimizers:
            self.optimizers[which % len(self.optimizers)].zero_grad(set_to_none)

    def do_clip(self, norm: float) -> SHARED:
        self.settle_shards()
        taken = owners(self.model)
        chosen = [p for name, p in self.model.named_parameters() if taken[name] is not None]
        if not any(p.grad is not None for p in chosen):
            return None
        total = nn.utils.clip_grad_norm_(chosen, norm)
        return total.full_tensor() if isinstance(total, DTensor) else total.clone()

    def do_scale_gradients(self, factor: float) -> SHARED:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    # Settings

    def do_sync(self, syncs: bool) -> SHARED:
        for part in parts_of(self.model):
            part.syncs = syncs
        for root in self.sharded_modules():
            root.set_requires_gradient_sync(syncs)

    def do_sum_copies(self, sums: bool) -> SHARED:
        for part in parts_of(self.model):
            part.sums_copies = sums
        for root in self.sharded_modules():
            root.set_requires_all_reduce(sums)

    def do_reshard_after_forward(self, at: int, frees: bool, recurse: bool) -> SHARED:
        modules = self.sharded_modules()
        if modules:
            modules[at % len(modules)].set_reshard_after_forward(frees, recurse=recurse)

    def do_prefetch(self, at: int, ahead: tuple[int, ...], backward: bool) -> SHARED:
        modules = self.sharded_modules()
        if modules:
            chosen = [modules[which % len(modules)] for which in ahead]
            module = modules[at % len(modules)]
            (module.set_modules_to_backward_prefetch if backward else module.set_modules_to_forward_prefetch)(chosen)

    def do_mode(self, training: bool) -> SHARED:
        self.model.train(training)

    def do_unshard(self, at: int, asynchronous: bool = False) -> SHARED:
        modules = self.sharded_modules()
        self.is_unsharded = True
        if modules:
            handle = modules[at % len(modules)].unshard(async_op=asynchronous)
            if handle is not None:
                handle.wait()

    def do_reshard(self, at: int) -> SHARED:
        modules = self.sharded_modules()
        if modules:
            modules[at % len(modules)].reshard()

    # Parameters

    def do_freeze(self, which: int, asks: bool) -> SHARED:
        self.settle_shards()
        if chosen := self.parameter(which):
            chosen[1].requires_grad_(asks)

    def do_freeze_part(self, at: int, asks: bool) -> SHARED:
        self.settle_shards()
        self.part(at).requires_grad_(asks)

    def do_write(self, which: int, how: str) -> SHARED:
        self.before_writing()
        chosen = self.parameter(which)
        if chosen is None:
            return
        parameter = chosen[1]
        with torch.no_grad():
            if how == "in place":
                parameter.mul_(0.9)
            elif how == "data in place":
                parameter.data.mul_(0.9)
            elif how == "data":
                parameter.data = parameter.data * 0.9
            elif how == "copy":
                parameter.copy_(parameter.detach().clone() * 0.9)
            elif how == "init":
                nn.init.constant_(parameter, 0.3)
            elif how == "foreach":
                torch._foreach_mul_([parameter], 0.9)
            else:
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(0.9)

    def do_drop_gradient(self, which: int) -> SHARED:
        self.settle_shards()
        if chosen := self.parameter(which):
            chosen[1].grad = None

    def do_load(self, factor: float, assign: bool) -> SHARED:
        """Load what was saved, times a factor."""
        self.before_writing()
        state = self.model.state_dict()
        names = " ".join(state)
        state = {name: value.detach() * factor if value.is_floating_point() else value for name, value in state.items()}
        # Assigned to a plain model, what two parts share would become two.
        is_tied = any(part.node.kind == "tied" for part in parts_of(self.model))
        self.model.load_state_dict(state, assign=assign and not is_tied)
        return names

    def do_copy(self) -> SHARED:
        """Go on with a deep copy."""
        self.settle_shards()
        self.graphs.clear()
        self.earlier.append(self.model)
        self.model = copy.deepcopy(self.model)

    def do_given(self, batch: int, factor: float, mode: str) -> SHARED:
        """torch.func.functional_call, with all parameters times a factor."""
        self.settle_shards()
        given = {name: parameter.detach() * factor for name, parameter in self.model.named_parameters()}
        x = self.inputs(batch)
        argument = {"x": x} if self.model.node.io == "dict" else x
        if self.model.node.io != "plain":
            return None
        with torch.set_grad_enabled(mode == "train"):
            try:
                return torch.func.functional_call(self.model, given, (argument,)).detach().clone()
            except ShardingError:
                return "refused"

    def do_second_derivative(self, batch: int) -> SHARED:
        """The gradient of a gradient's size with regard to the inputs; refused where parameters are sharded."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        x = self.inputs(batch, asks=True)
        _, loss = self.loss_of(self.model, x)
        try:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        except (ShardingError, RuntimeError) as error:
            # torch refuses it of what is recomputed by a backward of its own.
            if isinstance(error, RuntimeError) and "use_reentrant" not in str(error):
                raise
            return "refused"
        finally:
            self.clear_gradients()
            # What is refused recomputes nothing, and so changes them less often.
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        if grad is None or not grad.requires_grad:
            return None if grad is None else grad.detach().clone()
        (second,) = torch.autograd.grad(grad.square().sum(), x, allow_unused=True)
        return None if second is None else second.clone()


def _raise(*_: object) -> None:
    raise Planned("planned")


def _raise_at_gradient(values: Any) -> None:
    for_each_tensor(values, lambda tensor: tensor.register_hook(_raise) and tensor if tensor.requires_grad else tensor)
