"""An optimizer's state dict as one flat dict: `state.NAME.exp_avg`, `param_groups.NAME.lr`. Pure.

Flat dicts of different parts of a model (pipeline stages) have no key in common, so they can be saved as one state;
lists of groups would collide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from disttrain.errors import StateDictError

_STATE = "state."
_GROUPS = "param_groups."


def is_flat(state: Mapping[Any, Any]) -> bool:
    return bool(state) and all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in state)


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Options are there once for each parameter."""
    flat: dict[str, Any] = {}
    for name, values in state["state"].items():
        flat.update(_leaves(f"{_STATE}{name}", values))
    for group in state["param_groups"]:
        for name in group["params"]:
            flat.update({f"{_GROUPS}{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


def _leaves(prefix: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(f"{prefix}.{key}", value)
        else:
            yield f"{prefix}.{key}", value


def unflattened(flat: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The state of parameters by these names, each in a group of its own. What is another's is left out."""
    states: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind = _STATE if key.startswith(_STATE) else _GROUPS
        parts = _split(key.removeprefix(kind), names)
        if parts is None:
            continue
        name, keys = parts
        if kind == _GROUPS:
            groups.setdefault(name, {"params": [name]})[".".join(keys)] = value
            continue
        *inner, last = keys
        node = states.setdefault(name, {})
        for part in inner:
            node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise StateDictError("set_state_dict", f"{key!r} lies within a value.", "Give the state as it was made.")
        node[last] = value
    return {"state": states, "param_groups": list(groups.values())}


def _split(key: str, names: Collection[str]) -> tuple[str, list[str]] | None:
    """The longest name that the key begins with, and what follows it."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if name in names:
            return name, parts[end:]
    return None
