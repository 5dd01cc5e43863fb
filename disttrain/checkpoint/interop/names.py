"""Names in other formats: they join keys with dots, and so cannot tell `a.b` within a key from a key within a dict."""

from __future__ import annotations

import re
from collections.abc import Iterable

from disttrain.checkpoint.state.tree import Tree, parts_of
from disttrain.errors import CheckpointError

_OF_TORCH = re.compile(r"^optim(?:izer)?/state/([^/]+)/([^/]+)$")


def dotted(name: str) -> str:
    """The name that other formats give the leaf `name`: `model/layers.0.weight` is `model.layers.0.weight`."""
    return ".".join(parts_of(name))


class OwnNames:
    """The state's name for what another format calls `name`: the leaf of that name, else of that dotted name."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._by_dotted: dict[str, str] = {}

    def __call__(self, tree: Tree, name: str) -> str:
        if tree is not self._tree:
            self._tree = tree
            self._by_dotted = dotted_names(tree.leaves)
        return name if name in tree.leaves else self._by_dotted.get(dotted(name), name)


def dotted_names(names: Iterable[str]) -> dict[str, str]:
    """Maps dotted names to our names. Raises CheckpointError where two have the same."""
    by_dotted: dict[str, str] = {}
    for name in names:
        other = by_dotted.setdefault(dotted(name), name)
        if other != name:
            raise CheckpointError(
                "checkpoint", f"{other!r} and {name!r} are both {dotted(name)!r} there.", "Rename one of them."
            )
    return by_dotted


def torch_optimizer_names(name: str) -> str:
    """Maps a name that torch's `get_optimizer_state_dict` saved as "optimizer" or "optim" to ours; for `rename=`.

    Options of groups, which torch has by group and we by parameter, stay without a place: allow "missing" and
    "unexpected".
    """
    return _OF_TORCH.sub(r"optimizer/\1/state/\2", name)
