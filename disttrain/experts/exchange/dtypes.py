"""The dtypes of ranks' rows, as numbers that go with the sizes: what has unlike ones cannot be exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from disttrain.autocast import is_within_autocast
from disttrain.errors import ShapeError
from disttrain.experts.exchange.base import NAME
from disttrain.process_group import ProcessGroup

_Kind = tuple[torch.dtype, torch.dtype | None]
"""The dtype of rows, and the one that autocast makes of them for products."""
_KINDS: Final[tuple[_Kind, ...]] = tuple(
    (dtype, cast)
    for cast in (None, torch.bfloat16, torch.float16)
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64)
)
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}
NUM_CODES: Final = 16


def code_of(x: torch.Tensor) -> int:
    """The number of the dtype of x, and of what autocast makes of it: below NUM_CODES."""
    cast = torch.get_autocast_dtype(x.device.type) if is_within_autocast(x.device) else None
    return _CODES.get((x.dtype, cast), NUM_CODES - 1)


def check_alike(codes: Sequence[int], group: ProcessGroup) -> None:
    """Raise ShapeError where ranks of the group, whose codes these are, differ. All of them know the same codes."""
    if min(codes) == max(codes):
        return
    found = ", ".join(f"{_shown(code)} on {_ranks(codes, code, group)}" for code in dict.fromkeys(codes))
    raise ShapeError(
        NAME,
        f"ranks bring tokens of unlike dtypes: {found}.",
        "Cast the model and its input alike on all ranks, and enter torch.autocast on all or on none.",
        rank=group.world.rank,
    )


def _shown(code: int) -> str:
    if code >= len(_KINDS):
        return "another dtype"
    dtype, cast = _KINDS[code]
    return f"{dtype}" if cast is None else f"{dtype} within autocast to {cast}"


def _ranks(codes: Sequence[int], code: int, group: ProcessGroup) -> str:
    ranks = [str(member) for member, its in zip(group.members, codes, strict=True) if its == code]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"
