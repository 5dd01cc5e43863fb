"""The guards that a compiled block goes without: on functions and classes of this library, and on Python's builtins.

Dynamo checks at each call that every name which the forward has read is bound to what it was. Nobody rebinds these
while a model trains, and kernels (`use_kernels`) read many of them: the checks of a block of Llama with kernels take 64
us a call in place of 89. What others might rebind, as torch's functions, is checked as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from torch import nn

_FIXED: Final = (FunctionType, BuiltinFunctionType, type, ModuleType)
_OWN: Final = __name__.partition(".")[0]


def with_few_guards(options: dict[str, Any]) -> dict[str, Any]:
    """Options of torch.compile, with `keep_guards` where they leave room for it."""
    # torch takes a mode or options, not both.
    if options.get("mode") is not None:
        return options
    own = options.get("options") or {}
    return {**options, "options": {"guard_filter_fn": keep_guards, **own}}


def keep_guards(entries: Sequence[Any]) -> list[bool]:
    """For each of Dynamo's guards, whether it is checked."""
    return [not (entry.is_global and entry.has_value and _is_fixed(entry.name, entry.value)) for entry in entries]


def _is_fixed(name: str, value: object) -> bool:
    if not isinstance(value, _FIXED) or (isinstance(value, type) and issubclass(value, nn.Module)):
        return False
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == _OWN
    if name.startswith("G['__builtins_dict__"):
        return getattr(value, "__module__", None) == "builtins"
    return (getattr(value, "__module__", None) or "").partition(".")[0] == _OWN
