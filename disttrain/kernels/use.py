"""One call that gives a model the kernels: its norms, gated products, residual paths and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NamedTuple

from torch import fx, nn

from disttrain._python.made_classes import made_by
from disttrain.console import write
from disttrain.kernels.norms.modules import KERNEL_OF
from disttrain.kernels.rewrite import rewritten
from disttrain.kernels.tracing import Assumed, bare, is_as_traced, named_only


class Replaced(NamedTuple):
    """A replacement: in the module called `name`, `what` is now a kernel's."""

    name: str
    what: str


def use_kernels(model: nn.Module, report: Callable[[str], None] = write) -> tuple[Replaced, ...]:
    """Let `model`, which stays the same object with the same parameters and names, compute by kernels where it can.

    Replaced are nn.RMSNorm and nn.LayerNorm over one dim; and within the forward of any module, products of SiLU or
    GELU with another tensor, rotations of halves, a sum that goes into such a norm, and F.cross_entropy of an
    nn.Linear's output. A forward of which torch.fx cannot tell all (`tracing.py`), that differs between training and
    evaluation, or that has arguments with defaults, keeps all but its norms. Plain attributes that it reads are
    compared at each call; globals and the number of its modules are taken to stay.

    Call it before `fully_shard`, after `parallelize_module`. Modules that a tensor-parallel plan has made stay as they
    are. What a module computes later in an unforeseen dtype or shape goes the old way.

    Args:    report  is given the lines that say what was replaced; the default prints them.
    Returns: all that was replaced, by the modules' names.
    """
    replaced: list[Replaced] = []
    for name, module in model.named_modules():
        kernel = KERNEL_OF.get(type(module))
        if kernel is not None and len(module.normalized_shape) == 1:
            module.__class__ = kernel
            replaced.append(Replaced(name, type(module).__mro__[1].__name__))
    for name, module in model.named_modules():
        base = type(module)
        if (
            base.__module__.startswith("torch.nn.")
            or base in KERNEL_OF.values()
            or hasattr(base.forward, "_has_kernels")
        ):
            continue
        result = rewritten(module)
        if result is None:
            continue
        traced, kinds = result
        module.__class__ = _class_with(base, bare(traced.graph), traced.assumed)
        replaced += [Replaced(name, kind) for kind in kinds]
    counts = Counter(replacement.what for replacement in replaced)
    lines = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())) or "nothing"
    report(f"use_kernels: {type(model).__name__}: {lines}")
    return tuple(replaced)


_CLASSES: Final[dict[tuple[object, ...], type[nn.Module]]] = {}


def _class_with(base: type[nn.Module], graph: fx.Graph, assumed: tuple[Assumed, ...]) -> type[nn.Module]:
    """A subclass of `base` whose forward is the graph, or the class's where that is no more what it does; one for all
    that are alike.

    Submodules and parameters are read from `self`.
    """
    key = (base, graph.python_code("self").src, assumed)
    if key not in _CLASSES:
        _CLASSES[key] = made_by(_new_class(base, graph, assumed), _class_with, base, graph, assumed)
    return _CLASSES[key]


def _new_class(base: type[nn.Module], graph: fx.Graph, assumed: tuple[Assumed, ...]) -> type[nn.Module]:
    # Of a copy: a graph that a module has is pickled with it, and traced again.
    with_kernels: Any = type(fx.GraphModule(named_only(graph), bare(graph))).forward
    as_ever: Any = base.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_as_traced(self, assumed, (*args, *kwargs.values())):
            return with_kernels(self, *args, **kwargs)
        return as_ever(self, *args, **kwargs)

    # To Dynamo, which counts graphs by code, other classes' are none of this one's.
    forward.__code__ = forward.__code__.replace()
    forward._has_kernels = True  # type: ignore[attr-defined]
    forward = wraps(as_ever)(forward)
    return type(
        base.__name__,
        (base,),
        {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__},
    )
