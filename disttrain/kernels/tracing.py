"""Traces a module's forward to a graph (torch.fx) with its assumptions; or to none, where a trace may not show all.

The forward runs once with stand-ins for its arguments and tensors; its submodules are called, not read. A trace does
not show what Python does meanwhile, so that is watched. Attributes with plain values that were read are compared at
each call. There is no graph of a forward that sets an attribute, reads one that may change within (a list, a tensor
that is no buffer), creates a tensor, switches gradients, autocast or checkpointing, has its own gradient, or asks for
the type of a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, currentframe, signature
from threading import Lock
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn

from disttrain.kernels._torch import modes


class Assumed(NamedTuple):
    """The attribute `name` of the submodule at `path` had this value."""

    path: tuple[str, ...]
    name: str
    value: Any


class Trace(NamedTuple):
    graph: fx.Graph
    assumed: tuple[Assumed, ...]


def bare(graph: fx.Graph) -> fx.Graph:
    """The graph without what its tracer has noted, and nodes that are gone, which no pickle could hold."""
    fresh = fx.Graph()
    fresh.output(fresh.graph_copy(graph, {}))
    for node in fresh.nodes:
        node.meta, node.type = {}, None
    return fresh


def named_only(graph: fx.Graph) -> nn.Module:
    """A module that has what the graph reads by name, and nothing in it."""
    root = nn.Module()
    for node in graph.nodes:
        module = root
        for name in node.target.split(".") if node.op in ("call_module", "get_attr") else ():
            if not hasattr(module, name):
                module.add_module(name, nn.Module())
            module = getattr(module, name)
    return root


_TRACING: Final = Lock()
"""torch.fx changes classes of torch while it traces."""

_OF_MODULES: Final = frozenset(vars(nn.Module()))
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, type, FunctionType, BuiltinFunctionType)


def trace(module: nn.Module) -> Trace | None:
    """Traces the forward of the module's class; None where the trace may differ from what the forward does.

    So where that depends on `training`, or where an argument is optional: its stand-in would be there.
    """
    parameters = signature(type(module).forward).parameters.values()
    if "forward" in vars(module) or any(
        parameter.default is not Parameter.empty or parameter.kind is not Parameter.POSITIONAL_OR_KEYWORD
        for parameter in parameters
    ):
        return None
    was_training, traces = module.training, []
    try:
        for mode in (True, False):
            module.training = mode
            traces.append(_trace(module))
    except Exception:  # noqa: BLE001  (a trace runs the user's code with stand-ins; whatever that raises, there is none)
        return None
    finally:
        module.training = was_training
    codes = [(traced.graph.python_code("self").src, traced.assumed) for traced in traces]
    return traces[0] if codes[0] == codes[1] else None


def is_as_traced(module: nn.Module, assumed: tuple[Assumed, ...], values: tuple[Any, ...]) -> bool:
    """True if a trace shows what the module does with these arguments now."""
    for value in values:
        if not isinstance(value, (torch.Tensor, int, float)):
            return False
    for path, name, wanted in assumed:
        owner: Any = module
        for part in path:
            owner = getattr(owner, part)
        current = getattr(owner, name)
        if current is not wanted and (type(current) is not type(wanted) or current != wanted):
            return False
    return True


class _Untraceable(Exception):
    """Something is done that a graph does not tell."""


class _Watch:
    """The record of one trace. `is_untraceable` is kept, since the forward may catch what is raised."""

    def __init__(self, module: nn.Module) -> None:
        self.assumed: dict[tuple[tuple[str, ...], str], Any] = {}
        self.is_untraceable = False
        self.paths = {id(child): tuple(path.split(".")) if path else () for path, child in module.named_modules()}

    def refuse(self) -> None:
        self.is_untraceable = True
        raise _Untraceable

    def read(self, module: nn.Module, name: str, value: Any) -> None:
        path = self.paths[id(module)]
        if name in _OF_MODULES and not (name == "training" and path):
            return
        if not _is_plain(value):
            self.refuse()
        self.assumed[path, name] = value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


class _StandIn(fx.Proxy):
    """Answers nobody but torch what it is: as it is no tensor, the answer would be another one."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        frame = currentframe()
        asking = "abc"
        while frame is not None and asking in ("abc", __name__):
            frame = frame.f_back
            asking = "" if frame is None else frame.f_globals.get("__name__", "")
        if not asking.startswith(("torch.", "disttrain.kernels.")):
            self.tracer.watch.refuse()  # type: ignore[attr-defined]
        return _StandIn


class _Tracer(fx.Tracer):
    """Traces a module. Its modules are called, not read."""

    proxy_buffer_attributes = True

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch, self.modes = watch, modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _StandIn(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if modes() != self.modes:
            self.watch.refuse()
        return super().create_node(*args, **kwargs)


def _trace(module: nn.Module) -> Trace:
    watch = _Watch(module)
    with _TRACING, _watched(module, watch), _refusing_own_gradients(watch):
        graph = _Tracer(watch).trace(module)
    if watch.is_untraceable:
        raise _Untraceable
    return Trace(graph, tuple(Assumed(*path, value) for path, value in watch.assumed.items()))


@contextmanager
def _watched(module: nn.Module, watch: _Watch) -> Iterator[None]:
    """Lets `watch` hear of the attributes of the module and of those within it."""
    classes = [(child, type(child)) for child in module.modules()]
    kinds = {kind: _watched_class(kind, watch) for _, kind in classes}
    try:
        for child, kind in classes:
            child.__class__ = kinds[kind]
        yield
    finally:
        for child, kind in classes:
            child.__class__ = kind


def _watched_class(kind: type[nn.Module], watch: _Watch) -> Any:
    def read(self: nn.Module, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name in object.__getattribute__(self, "__dict__"):
            watch.read(self, name, value)
        return value

    def write(self: nn.Module, name: str, value: Any = None) -> None:
        if name == "__class__":
            object.__setattr__(self, name, value)
        else:
            watch.refuse()

    namespace = {"__getattribute__": read, "__setattr__": write, "__delattr__": write, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), namespace)


@contextmanager
def _refusing_own_gradients(watch: _Watch) -> Iterator[None]:
    """Refuses an autograd.Function of a stand-in within the block: operators of its forward don't show its backward."""
    original: Any = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(value) is _StandIn for value in (*args, *kwargs.values())):
            watch.refuse()
        run: Callable[..., Any] = original.__func__
        return run(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
