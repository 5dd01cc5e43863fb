"""The one door to what torch keeps private about hooks of tensors, and about nested values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)


@contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, what `register_hook` has put on these tensors is not called."""
    hooks = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, of_tensor in hooks:
            tensor._backward_hooks = of_tensor


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested tuples, lists, dicts and registered classes, and what they hang on."""
    return tree_flatten(tree, is_leaf)


def flatten_with_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """The same with the path to each leaf, such as `['mask'][0]`."""
    leaves, structure = tree_flatten_with_path(tree, is_leaf)
    return [(keystr(path), leaf) for path, leaf in leaves], structure


def unflatten(leaves: Sequence[Any], structure: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    return tree_unflatten(leaves, structure)
