"""The only file of `mesh` that uses torch's private names, of objects that graphs have as constants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._library import fake_class_registry, opaque_object
from torch._library.fake_class_registry import FakeScriptObject
from torch._opaque_base import OpaqueBase, OpaqueBaseMeta


class _GraphConstantMeta(OpaqueBaseMeta):
    """torch's `isinstance` sees through stand-ins, which constants never have, and takes three times as long."""

    __instancecheck__ = type.__instancecheck__


class _StoodInMeta(OpaqueBaseMeta):
    """The type of constants for Dynamo. Before torch 2.13 constants do have stand-ins, while Dynamo reads: these are
    what they stand for."""

    def __instancecheck__(self, instance: object) -> bool:
        return type.__instancecheck__(self, instance) or (
            type(instance) is FakeScriptObject and type.__instancecheck__(self, instance.real_obj)
        )

    def __subclasscheck__(self, subclass: type) -> bool:
        """Answers Dynamo, which asks this where `isinstance` is given several classes, and would take False for the
        answer."""
        if subclass is FakeScriptObject:
            _end_graph(self)
        return type.__subclasscheck__(self, subclass)


def _end_graph(cls: type) -> None:
    from torch._dynamo import exc  # loaded by whoever makes a graph

    exc.unimplemented(
        gb_type="isinstance() with several classes",
        context=cls.__qualname__,
        explanation="Before torch 2.13 Dynamo takes the stand-in of a constant for no object of any of them.",
        hints=["Ask for each class on its own.", "Of placements ask is_shard(), is_replicate() or is_partial()."],
    )


_Meta: Any = _GraphConstantMeta if torch.__version__ >= "2.13" else _StoodInMeta


class GraphConstant(OpaqueBase, metaclass=_Meta):  # type: ignore[metaclass]
    """Base of classes whose objects graphs hold.

    torch 2.11 asks for the metaclass, by which `isinstance` is right in what Dynamo reads; 2.13 does without.
    """

    if torch.__version__ >= "2.13":

        def tracing_mode(self) -> str:
            """Says to torch, which asks objects of graphs by this name, what stands for this one.

            "real" where AOTAutograd makes stand-ins of what a graph returns: it would hand them out in the object's
            place. "fake", as if there was no answer, to Dynamo: for it a real one is an input of the graph.
            """
            return "real" if sys._getframe(2).f_code is fake_class_registry.maybe_to_fake_obj.__code__ else "fake"


def hold_in_graphs(cls: type, members: Sequence[str]) -> None:
    """Let graphs hold objects of class `cls` as constants, equal ones for each other; `members` are constants, or give
    some when called. Classes that derive of it are to be named as well.

    The class has `__eq__`, `__hash__`, and `__fx_repr__`, which gives an expression for an object and the names in it.
    """
    use_real = dict.fromkeys(members, opaque_object.MemberType.USE_REAL)
    opaque_object.register_opaque_type(cls, typ="value", members=use_real)
