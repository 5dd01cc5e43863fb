"""The one door to what torch keeps private about constants of graphs: objects that compilers compare and don't read."""

from __future__ import annotations

from collections.abc import Sequence

from torch._library import opaque_object
from torch._opaque_base import OpaqueBase, OpaqueBaseMeta


class _GraphConstantMeta(OpaqueBaseMeta):
    """torch's `isinstance` sees through stand-ins, which constants never have, and takes three times as long."""

    __instancecheck__ = type.__instancecheck__


class GraphConstant(OpaqueBase, metaclass=_GraphConstantMeta):
    """Base of classes whose objects graphs hold.

    torch 2.11 asks for the metaclass, by which `isinstance` is right in what Dynamo reads; 2.13 does without.
    """


def hold_in_graphs(cls: type, members: Sequence[str]) -> None:
    """Let graphs hold objects of class `cls` as constants, equal ones for each other; `members` are constants, or give
    some when called. Classes that derive of it are to be named as well.

    The class has `__eq__`, `__hash__`, and `__fx_repr__`, which gives an expression for an object and the names in it.
    """
    use_real = dict.fromkeys(members, opaque_object.MemberType.USE_REAL)
    opaque_object.register_opaque_type(cls, typ="value", members=use_real)
