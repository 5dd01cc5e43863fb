"""A save that has been opened, of any format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.loading.reader import Reader
from disttrain.checkpoint.state.tree import Tree


@dataclass(frozen=True)
class Source:
    """An opened save of any format. `own_name`, where there is one, gives the state's name for one of the save's,
    and `joined` the save with what the state has as one value, by the state's names."""

    where: str
    manifest: Manifest
    reader: Reader
    own_name: Callable[[Tree, str], str] | None = None
    joined: Callable[[Tree, Manifest], Manifest] | None = None
