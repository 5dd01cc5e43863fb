"""Flattens a state into a list of leaves: dicts are taken apart, and whatever has a state of its own gives it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from disttrain.checkpoint.state.training import load_model_state, model_state
from disttrain.checkpoint.state.tree import Opening, Tree, name_of
from disttrain.checkpoint.stateful import PerRank, Stateful, Unfilled, Value, make_plain
from disttrain.dtensor import DTensor
from disttrain.errors import CheckpointError


def take_apart(operation: str, state: Mapping[str, Any]) -> Tree:
    """The leaves of `state`; modules and Statefuls give theirs. Raises CheckpointError for what cannot be saved."""
    if not isinstance(state, dict):
        raise CheckpointError(
            operation, f"the state is a {type(state).__name__}, not a dict.", "Give each part a name."
        )
    tree = Tree(operation)
    _descend(tree, "", state, is_bare=True)
    return tree


def _descend(tree: Tree, prefix: str, node: dict[Any, Any], *, is_bare: bool) -> None:
    for key, child in list(node.items()):
        if not isinstance(key, str):
            where = f"{prefix[:-1]!r}" if prefix else "the state"
            problem = f"{where} has the key {key!r} ({type(key).__name__}); keys must be text, they become names."
            raise CheckpointError(
                tree.operation, problem, f"Write {str(key)!r}, or wrap a dict without sharded tensors in Value."
            )
        name = prefix + name_of([key])
        if isinstance(child, torch.Tensor | Value):
            _add_leaf(tree, name, node, key)
        elif type(child) is dict and child and all(isinstance(inner, str) for inner in child):
            _descend(tree, name + "/", child, is_bare=is_bare)
        elif _is_own_of_each_rank(child):
            _take_own(tree, name, child)
        elif _gives_its_state(child):
            _take_stateful(tree, name, child)
        elif isinstance(child, nn.Module):
            state = model_state(child)
            tree.listeners.append(partial(load_model_state, child, state))
            _descend(tree, name + "/", state, is_bare=is_bare)
        elif isinstance(child, torch.optim.Optimizer):
            raise CheckpointError(
                tree.operation,
                f"{name!r} is an optimizer, whose own state names parameters by number.",
                "Give what get_state_dict(model, optimizers) returns, which names them as the model does.",
            )
        elif isinstance(child, Unfilled):
            tree.openings[name] = Opening(partial(_slot_root, node, key), child.make)
        elif isinstance(child, dict) and child and all(isinstance(inner, str) for inner in child):
            _descend(tree, name + "/", child, is_bare=is_bare)
        else:
            _add_leaf(tree, name, node, key)
            if is_bare and not isinstance(child, PerRank) and not holds(torch.Tensor, child):
                tree.bare.append(name)


def _is_own_of_each_rank(child: Any) -> bool:
    """True if its state differs by rank: a data loader's position, or an object that says so."""
    if isinstance(child, PerRank):
        return not isinstance(child.value, dict | torch.Tensor) and isinstance(child.value, Stateful)
    # Not imported: a program that has such an object has loaded its library.
    is_of_torchdata = any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(child).__mro__)
    return is_of_torchdata and isinstance(child, Stateful)


def _gives_its_state(child: Any) -> bool:
    """True if its own `state_dict` is what is saved: Statefuls come before whatever else they are.

    Modules and optimizers have the methods anyway; they are Statefuls when they say so, or an optimizer names its
    parameters itself.
    """
    if isinstance(child, dict | nn.Module | torch.optim.Optimizer):
        of_torch = getattr(sys.modules.get("torch.distributed.checkpoint.stateful"), "Stateful", Stateful)
        if any(kind in (Stateful, of_torch) for kind in type(child).__mro__):
            return True
        if isinstance(child, torch.optim.Optimizer):
            return type(child).state_dict is not torch.optim.Optimizer.state_dict
    return type(child) is not dict and not isinstance(child, nn.Module) and isinstance(child, Stateful)


def _take_stateful(tree: Tree, name: str, child: Stateful) -> None:
    state = _state_of(tree, name, child)
    tree.listeners.append(partial(child.load_state_dict, state))
    tree.openings[name] = Opening(partial(_itself, state), make_plain)
    _descend(tree, name + "/", state, is_bare=False)


def _take_own(tree: Tree, name: str, child: Any) -> None:
    stateful, rank = (child.value, child.rank) if isinstance(child, PerRank) else (child, 0)
    wrapped = PerRank(_state_of(tree, name, stateful), rank)
    holder: dict[str, Any] = {name: wrapped}

    def hand_over() -> None:
        if holder[name] is not wrapped:
            stateful.load_state_dict(holder[name].value)

    tree.listeners.append(hand_over)
    _add_leaf(tree, name, holder, name)


def _state_of(tree: Tree, name: str, child: Stateful) -> dict[str, Any]:
    state = child.state_dict()
    if not isinstance(state, dict):
        raise CheckpointError(
            tree.operation, f"the state_dict() of {name!r} is a {type(state).__name__}.", "Have it return a dict."
        )
    return state


def _add_leaf(tree: Tree, name: str, node: dict[str, Any], key: str) -> None:
    _check_leaf(tree.operation, name, node[key])
    tree.leaves[name] = node[key]
    tree.places[name] = node, key


def _itself(state: dict[str, Any]) -> dict[str, Any]:
    return state


def _slot_root(node: dict[str, Any], key: str) -> dict[str, Any]:
    """The dict that has taken the place of an Unfilled."""
    if isinstance(node[key], Unfilled):
        node[key] = {}
    return cast(dict[str, Any], node[key])


def _check_leaf(operation: str, name: str, leaf: Any) -> None:
    if name == "__metadata__":
        raise CheckpointError(operation, "the name '__metadata__' is safetensors' own.", "Rename the entry.")
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
            kind = "on the meta device" if leaf.is_meta else f"{leaf.layout}, quantized={leaf.is_quantized}"
            raise CheckpointError(
                operation,
                f"tensor {name!r} is {kind}.",
                "Give strided tensors with values (module.to_empty makes some).",
            )
    elif holds(DTensor, leaf):
        raise CheckpointError(operation, f"the value {name!r} has a DTensor in it.", "Put it in a dict, under a name.")


def holds(kind: type | tuple[type, ...], value: Any) -> bool:
    """True if something of that kind is in a value."""
    if isinstance(value, Value | PerRank):
        return holds(kind, value.value)
    if isinstance(value, dict | list | tuple):
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return any(holds(kind, item) for item in inner)
    return isinstance(value, kind)
