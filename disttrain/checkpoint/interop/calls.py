"""Loads and saves in other formats as `load` and `save` do, and converts between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from disttrain.checkpoint.format.manifest import MANIFEST
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.interop.dcp import METADATA, open_dcp
from disttrain.checkpoint.interop.dcp_writing import DcpFormat
from disttrain.checkpoint.interop.exporting import Advance, Format, export, save_as
from disttrain.checkpoint.interop.native_writing import NativeFormat
from disttrain.checkpoint.interop.safetensors_files import SUFFIX, open_safetensors
from disttrain.checkpoint.interop.safetensors_writing import SafetensorsFormat
from disttrain.checkpoint.interop.selection import select
from disttrain.checkpoint.interop.torch_files import open_torch
from disttrain.checkpoint.loading.fits import LoadReport, Misfit, Rename, Rules
from disttrain.checkpoint.loading.load import load_source, open_save
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.storage.base import Storage, locate
from disttrain.errors import CheckpointError

FormatName = Literal["disttrain", "dcp", "safetensors"]
FORMATS = ("disttrain", "dcp", "safetensors")
MAX_FILE_BYTES = 5_000_000_000
"""As Hugging Face's libraries cut files by default."""


def load_dcp(
    state_dict: dict[str, Any],
    path: str | Path,
    *,
    storage: Storage | None = None,
    allow: Iterable[Misfit] = (),
    rename: Rename | None = None,
    convert: str | Iterable[str] = (),
) -> LoadReport:
    """Load a folder that torch.distributed.checkpoint saved; otherwise as `load`.

    A name there fits the leaf whose keys, joined by dots, are that name; lists with tensors are dicts with the keys
    "0", "1", ... `rename` gets names as our own format has them, such as `model/layers.0.weight`.
    """
    return _load("load_dcp", open_dcp, state_dict, path, storage, Rules.of(allow, convert, rename))


def load_safetensors(
    state_dict: dict[str, Any],
    path: str | Path,
    *,
    storage: Storage | None = None,
    allow: Iterable[Misfit] = (),
    rename: Rename | None = None,
    convert: str | Iterable[str] = (),
) -> LoadReport:
    """Load a safetensors file, or a folder of them with or without an index; otherwise as `load`.

    The state is mostly `training_state(model)["model"]`: its names are the files'. A tensor that the state has under
    two names needs to be there under one.
    """
    return _load("load_safetensors", open_safetensors, state_dict, path, storage, Rules.of(allow, convert, rename))


def load_torch(
    state_dict: dict[str, Any],
    path: str | Path,
    *,
    storage: Storage | None = None,
    allow: Iterable[Misfit] = (),
    rename: Rename | None = None,
    convert: str | Iterable[str] = (),
) -> LoadReport:
    """Load a file of torch.save that holds a dict, to any depth, of tensors and plain values; otherwise as `load`.

    What torch.load would refuse with weights_only=True is refused.
    """
    return _load("load_torch", open_torch, state_dict, path, storage, Rules.of(allow, convert, rename))


def save_dcp(state_dict: dict[str, Any], path: str | Path, *, storage: Storage | None = None) -> None:
    """Save a state into the new folder `path` so that torch.distributed.checkpoint's `load` reads it.

    Needs room for the state twice while it saves. Otherwise as `save`; values per rank are refused.
    Collective: every rank of the default world, or one process without a world.
    """
    storage, target = locate(path, storage)
    save_as(Consensus("save_dcp"), state_dict, target, storage, DcpFormat())


def save_safetensors(
    state_dict: dict[str, Any],
    path: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    storage: Storage | None = None,
) -> None:
    """Save tensors into the new folder `path` as Hugging Face's libraries do: whole ones, under dotted names.

    One file `model.safetensors`, or, where that would be larger than `max_file_bytes`, several with an index. A tensor
    that the state has under two names is written under the first. Needs room for the state twice while it saves.
    Otherwise as `save`; values are refused.
    Collective: every rank of the default world, or one process without a world.
    """
    storage, target = locate(path, storage)
    save_as(Consensus("save_safetensors"), without_empty(state_dict), target, storage, _safetensors(max_file_bytes))


def convert(
    source: str | Path,
    target: str | Path,
    to: FormatName,
    *,
    only: str | Iterable[str] = (),
    without: str | Iterable[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    advance: Advance = lambda num_bytes: None,
) -> tuple[str, ...]:
    """Write what is saved at `source`, in whichever format, to the new folder `target`.

    Holds a tensor, or a file of small ones, at a time. `advance` hears how many more bytes are written.
    Args:    only, without  what of the save: names, what names begin with ("optimizer"), or patterns. For safetensors,
                            which hold tensors alone, it is the part "model" where nothing is said and there is more;
                            names then begin below it, and so for any one part.
    Returns: which parts were left out.
    Raises:  CheckpointError for what the format has no place for, and for parts that are not there.
    Collective: every rank of the default world, or one process without a world.
    """
    storage, folder = locate(target)
    consensus = Consensus("convert")
    save_id: str = consensus.agree(lambda: None, lambda _: uuid4().hex)
    forms: dict[str, Callable[[], Format]] = {
        "disttrain": lambda: NativeFormat(save_id),
        "dcp": DcpFormat,
        "safetensors": lambda: _safetensors(max_file_bytes),
    }
    if to not in forms:
        raise CheckpointError("convert", f"there is no format {to!r}.", f"There are {', '.join(FORMATS)}.")
    parts = [(name,) if isinstance(name, str) else tuple(name) for name in (only, without)]
    left_out: tuple[str, ...] = ()

    def open_chosen() -> Source:
        nonlocal left_out
        opened = open_any(source)
        chosen, left_out = select(opened.manifest, to, *parts)
        return replace(opened, manifest=chosen)

    export(consensus, open_chosen, folder, storage, forms[to](), advance)
    return left_out


def open_any(path: str | Path) -> Source:
    """A save in whichever format. Raises CheckpointError where there is none."""
    storage, folder = locate(path)
    names = storage.names(folder)
    if MANIFEST in names:
        return open_save(storage, folder)
    if METADATA in names:
        return open_dcp(storage, folder)
    if folder.name.endswith(SUFFIX) or any(name.endswith(SUFFIX) for name in names):
        return open_safetensors(storage, folder)
    if names:
        raise CheckpointError("open", f"{path} is no save of a known format.", "Give a save, or a checkpoint's folder.")
    try:
        with storage.open_file(folder):
            pass
    except FileNotFoundError:
        remedy = "Give a save, a checkpoint's folder, or a folder with saves."
        raise CheckpointError("open", f"{path} is not there.", remedy) from None
    return open_torch(storage, folder)


def _load(
    operation: str,
    opened: Callable[[Storage, Path], Source],
    state: dict[str, Any],
    path: str | Path,
    storage: Storage | None,
    rules: Rules,
) -> LoadReport:
    located, folder = locate(path, storage)
    return load_source(Consensus(operation), state, lambda: opened(located, folder), rules)


def without_empty(state: dict[str, Any]) -> dict[str, Any]:
    """Without empty dicts, which have no place among tensors and of which nothing is lost."""
    if type(state) is not dict:
        return state
    inner = {key: without_empty(value) if type(value) is dict else value for key, value in state.items()}
    return {key: value for key, value in inner.items() if type(value) is not dict or value}


def _safetensors(max_file_bytes: int) -> SafetensorsFormat:
    if max_file_bytes < 1:
        raise CheckpointError("save_safetensors", f"max_file_bytes is {max_file_bytes}.", "Give at least 1.")
    return SafetensorsFormat(max_file_bytes)
