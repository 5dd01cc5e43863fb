"""One call that gives a model the kernels: its norms, gated products, residual paths and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx, nn

from disttrain.console import write
from disttrain.kernels.norm_modules import KERNEL_OF
from disttrain.kernels.rewrite import rewritten


class Replaced(NamedTuple):
    """In the module called `name`, `what` is now a kernel's."""

    name: str
    what: str


def use_kernels(model: nn.Module, report: Callable[[str], None] = write) -> tuple[Replaced, ...]:
    """Let `model`, which stays the same object with the same parameters and names, compute by kernels where it can.

    Replaced are nn.RMSNorm and nn.LayerNorm over one dim; and within the forward of any module, products of SiLU or
    GELU with another tensor, rotations of halves, a sum that goes into such a norm, and F.cross_entropy of an
    nn.Linear's output. A forward that torch.fx cannot trace, that differs between training and evaluation, or that has
    arguments with defaults, keeps all but its norms; one that reads Python's state while it runs keeps what it read
    now.

    Call it before `fully_shard`, after `parallelize_module`. Modules that a tensor-parallel plan has made stay as they
    are. What a module computes later in an unforeseen dtype or shape goes the old way.

    Args:    report  is given the lines that say what was replaced; the default prints them.
    Returns: all that was replaced, by the modules' names.
    """
    found: list[Replaced] = []
    for name, module in model.named_modules():
        kernel = KERNEL_OF.get(type(module))
        if kernel is not None and len(module.normalized_shape) == 1:
            module.__class__ = kernel
            found.append(Replaced(name, type(module).__mro__[1].__name__))
    classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn.") or type(module) in KERNEL_OF.values():
            continue
        result = rewritten(module)
        if result is None:
            continue
        graph, kinds = result
        key = (type(module), graph.python_code("self").src)
        if key not in classes:
            classes[key] = _class_with(module, graph)
        module.__class__ = classes[key]
        found += [Replaced(name, kind) for kind in kinds]
    counts = Counter(one.what for one in found)
    lines = ", ".join(f"{count} x {what}" for what, count in sorted(counts.items())) or "nothing"
    report(f"use_kernels: {type(model).__name__}: {lines}")
    return tuple(found)


def _class_with(module: nn.Module, graph: fx.Graph) -> type[nn.Module]:
    """A subclass of the module's class whose forward is the graph; submodules and parameters are read from `self`."""
    forward: Any = type(fx.GraphModule(module, graph)).forward
    own = type(module)
    return type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__, "__doc__": own.__doc__})
