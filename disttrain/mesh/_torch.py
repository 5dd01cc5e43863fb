"""The one door to what torch keeps private about constants of graphs: objects that compilers compare and don't read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._library import opaque_object
from torch._opaque_base import OpaqueBase

GraphConstant: Any = OpaqueBase
"""Base of a class whose objects graphs hold. Of its own it has nothing; torch 2.11 asks for its metaclass, by which
`isinstance` is right in what Dynamo reads."""


def hold_in_graphs(cls: type, members: Sequence[str]) -> None:
    """Let graphs hold objects of class `cls` as constants, equal ones for each other; `members` are constants, or give
    some when called. Classes that derive of it are to be named as well.

    The class has `__eq__`, `__hash__`, and `__fx_repr__`, which gives an expression for an object and the names in it.
    """
    use_real = dict.fromkeys(members, opaque_object.MemberType.USE_REAL)
    opaque_object.register_opaque_type(cls, typ="value", members=use_real)
