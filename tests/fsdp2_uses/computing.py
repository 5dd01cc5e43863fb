"""Uses that compute: forwards and backwards of all kinds, and what is raised within."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from disttrain.errors import ShardingError
from disttrain.fsdp2.modules.pytrees import for_each_tensor
from tests.fsdp2_uses.models import parts_of
from tests.fsdp2_uses.session import Compared, Session, whole_of


class Planned(Exception):
    """What a program raises on purpose."""


class Computing(Session):
    """What may be done with inputs."""

    def do_forward(self, batch: int, at: int = 0, mode: str = "train", asks: bool = False) -> Compared:
        """`asks` for a gradient of the input."""
        x = self.inputs(batch, asks and mode == "train")
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
        with context():
            output, loss = self.loss_of(self.callable_part(at), x)
        if mode == "train" and loss.requires_grad:
            self.graphs.append((loss, x))
        return [output.detach().clone(), loss.detach().clone()]

    def do_method(self, batch: int, mode: str = "train") -> Compared:
        x = self.inputs(batch)
        with torch.set_grad_enabled(mode == "train"):
            output = self.model.extra(x if self.model.node.io != "dict" else {"x": x})
        return output.detach().double()

    def do_backward(self, which: int = 0, retain: bool = False, together: bool = False) -> Compared:
        if not self.graphs:
            return None
        steps = any(does == "step" for hooks in self.hooks.values() for _, does in hooks)
        # Graphs that are recomputed in turn would be so with what a hook has written after the one before.
        is_reentrant = any(part.node.kind == "recomputed reentrant" for part in parts_of(self.model))
        chosen = self.graphs if together and not (steps and is_reentrant) else [self.graphs[which % len(self.graphs)]]
        if not retain:
            self.graphs = [graph for graph in self.graphs if not any(graph is one for one in chosen)]
        for _, x in chosen:
            x.grad = None
        torch.autograd.backward([loss for loss, _ in chosen], retain_graph=retain)
        self.is_unsharded |= self.keeps_after_backward
        if steps:
            # What these have written to would be refused to the backwards of earlier forwards.
            self.graphs.clear()
        return [None if x.grad is None else x.grad.clone() for _, x in chosen]

    def do_write_between(self, batch: int, at: int) -> Compared:
        """Write to a part's parameters between a forward and its backward. Gradients are those at what the forward has
        computed with, or refused, as torch refuses them where it has kept what was written to."""
        if any(part.node.kind.startswith("recomputed") for part in parts_of(self.model)):
            # There, torch itself recomputes with what was written, and says nothing.
            return None
        if self.hooks:
            # What steps within the backward writes after what is written here, or before.
            return None
        self.before_writing()
        _, loss = self.loss_of(self.model, self.inputs(batch))
        if not self.is_sharded and loss.requires_grad and not self.is_refused:
            loss.backward()
        with torch.no_grad():
            for parameter in self.part(at).parameters():
                parameter.mul_(0.8)
        try:
            if self.is_sharded and loss.requires_grad:
                loss.backward()
        except (ShardingError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "modified by an inplace operation" not in str(error):
                raise
            self.is_refused = True
        # What a backward leaves gathered is as it was before that was written.
        self.is_unsharded |= self.keeps_after_backward
        self.settle_shards()
        if not self.is_refused:
            return "gave gradients"
        self.clear_gradients()
        return "refused"

    def do_penalty(self, batch: int) -> Compared:
        """A loss of which a term is the parameters' own, and its backward."""
        if self.hooks or not all(part.syncs and part.sums_copies for part in parts_of(self.model)):
            # What a parameter's own term brings is not kept back, and comes by itself.
            return None
        self.settle_shards()
        _, loss = self.loss_of(self.model, self.inputs(batch))
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        total = loss + sum(whole_of(p.square().sum(), grad=True) for p in parameters) * 0.01
        if total.requires_grad:
            total.backward()
        self.is_unsharded |= self.keeps_after_backward
        return total.detach().clone()

    def do_input_gradients(self, batch: int) -> Compared:
        """torch.autograd.grad with regard to the inputs."""
        x = self.inputs(batch, asks=True)
        _, loss = self.loss_of(self.model, x)
        (grad,) = torch.autograd.grad(loss, x, allow_unused=True)
        self.is_unsharded |= self.keeps_after_backward
        return None if grad is None else grad.clone()

    def do_raise_in_forward(self, batch: int, at: int, before: bool, mode: str = "train") -> Compared:
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

    def do_raise_in_backward(self, batch: int, at: int, before: bool) -> Compared:
        """By the gradient of a part's inputs or outputs. What came of the gradients before is cleared."""

        if self.hooks:
            # Which of them have been called before it fails is a matter of order.
            return None

        hooks: list[RemovableHandle] = []

        def raise_at(tensor: torch.Tensor) -> torch.Tensor:
            # A pass without gradients gives out nothing that has one, but perhaps a parameter.
            if tensor.requires_grad and torch.is_grad_enabled():
                hooks.append(tensor.register_hook(_raise))
            return tensor

        def of_output(_: nn.Module, args: object, output: Any) -> None:
            for_each_tensor(output, raise_at)

        def of_input(_: nn.Module, args: Any, kwargs: Any) -> Any:
            # The same tensor may be used elsewhere, which is no matter of this part.
            args, kwargs = for_each_tensor((args, kwargs), torch.clone)
            for_each_tensor((args, kwargs), raise_at)
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
        self.is_unsharded |= self.keeps_after_backward
        for hook in hooks:
            # One may be a parameter's, which outlives the pass.
            hook.remove()
        self.clear_gradients()
        return result

    def do_given(self, batch: int, factor: float, mode: str) -> Compared:
        """torch.func.functional_call, with all parameters times a factor."""
        self.settle_shards()
        given = {name: parameter.detach() * factor for name, parameter in self.model.named_parameters()}
        x = self.inputs(batch)
        argument = {"x": x} if self.model.node.io == "dict" else x
        if self.model.node.io != "plain" or any(part.node.kind == "shared" for part in parts_of(self.model)):
            # Where a module sits at two places, torch itself leaves in it what was given.
            return None
        with torch.set_grad_enabled(mode == "train"):
            try:
                return torch.func.functional_call(self.model, given, (argument,)).detach().double()
            except ShardingError:
                return "refused"

    def do_second_derivative(self, batch: int) -> Compared:
        """The gradient of a gradient's size with regard to the inputs; refused where parameters are sharded."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        x = self.inputs(batch, asks=True)
        _, loss = self.loss_of(self.model, x)
        try:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
            if grad is not None and grad.requires_grad:
                (grad,) = torch.autograd.grad(grad.square().sum(), x, allow_unused=True)
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
        return None if grad is None else grad.detach().clone()


def _raise(*_: object) -> None:
    raise Planned("planned")
