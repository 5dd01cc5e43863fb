"""Checks parameters that are to be gathered together; errors name the first one that breaks a rule."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from typing import NoReturn

import torch

from disttrain.errors import ShardingError
from disttrain.fsdp2.params.param import ShardedParam


def common_dtype(params: Sequence[ShardedParam], rank: int) -> torch.dtype:
    """The dtype of all these shards. Raises ShardingError where they have several."""
    dtypes = {param.orig_dtype: param.fqn for param in params}
    if len(dtypes) > 1:
        raise ShardingError(
            "fully_shard",
            f"parameters that are gathered together have become of different dtypes: {dtypes}.",
            "Convert all of them alike, or before fully_shard.",
            rank=rank,
        )
    return next(iter(dtypes))


def refuse_device(param: ShardedParam, device: torch.device, wanted: torch.device, rank: int) -> NoReturn:
    """Raise ShardingError for a shard that this rank cannot compute with."""
    raise ShardingError(
        "forward",
        f"parameter {param.fqn} is on {device}, and this rank computes on {wanted}.",
        f"Call model.to_empty(device={str(wanted)!r}) and initialise or load the parameters first."
        if device.type == "meta"
        else f"Move the model there: model.to({str(wanted)!r}).",
        rank=rank,
    )


def refuse_parts_on_meta(params: Sequence[ShardedParam], wanted: torch.device, rank: int) -> None:
    """Raise ShardingError where some of these shards have no values, and others have."""
    on_meta = [param for param in params if param.sharded.is_meta]
    if 0 < len(on_meta) < len(params):
        refuse_device(on_meta[0], on_meta[0].sharded.device, wanted, rank)


def refuse_transform(kind: str) -> NoReturn:
    """Raise ShardingError for a forward of a module of this kind."""
    raise ShardingError(
        "forward",
        f"this {kind} is sharded, and called within a transform of torch.func.",
        "Differentiate by torch.autograd.grad or backward(), or leave it out of fully_shard.",
    )


def is_begun(outputs: object) -> bool:
    """True if a forward returns before it has run, as a generator function or an `async` function does."""
    return isinstance(outputs, Generator | AsyncGenerator | Coroutine)


def refuse_begun(outputs: object, kind: str) -> None:
    """Raise ShardingError for such a forward of a module of this kind, where nobody waits for it to run."""
    if is_begun(outputs):
        raise ShardingError(
            "forward",
            f"this {kind} returns a {type(outputs).__name__}, which runs when the parameters are gathered no longer.",
            "Return a list of what it yields.",
        )
