"""Finds this rank's call of a certain collective of a group in its ring, for other ranks to compare with."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from disttrain.flight_recorder.record.process.symbols import LIBRARIES, PACKAGE

if TYPE_CHECKING:
    from disttrain.flight_recorder.record.record import CallSite

_ONE_SIZE: Final = {"all_reduce", "broadcast", "reduce", "gather"}
"""Operations whose inputs have as many elements on all ranks."""
_IN_AND_OUT: Final = {"all_gather_into_tensor", "reduce_scatter_tensor"}
"""Those whose outputs have, too."""
_OUTPUTS: Final = {"all_gather", "scatter"}
"""Those of which the outputs have, and not always the inputs."""
_PARTS: Final = {
    "reduce_scatter",
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "all_reduce_coalesced",
    "reduce_scatter_tensor_coalesced",
}
"""Those with several inputs, alike on all ranks one by one."""


class HasRing(Protocol):
    """A recorder."""

    def content(self) -> bytes:
        """As `FlightRecorder.content`."""
        ...


def recall(recorder: HasRing, group_name: str, sequence: int) -> dict[str, Any] | None:
    """`fields` that are alike on all ranks where all is well, and `text`; None for what is not on record."""
    # Here: what reads rings takes longer to load than all of a world's start.
    from disttrain.flight_recorder.dumps.expanding import expanded
    from disttrain.flight_recorder.dumps.rings.reader import decode_ring  # as above

    dump, _ = decode_ring(recorder.content())
    for record in reversed(expanded(dump).records):
        site = record.site
        if record.sequence == sequence and site.group_name == group_name and site.operation not in ("send", "recv"):
            return {"fields": fields_of_site(site), "text": _text(site, record.module)}
    return None


def recall_sites(content: bytes, called: Sequence[Sequence[tuple[int, str]]]) -> list[list[dict[str, Any]]]:
    """As `recall`, of calls by the numbers of their sites and their modules, in a ring of this content."""
    from disttrain.flight_recorder.dumps.rings.reader import sites_of  # as above

    sites = sites_of(content)
    return [
        [{"fields": fields_of_site(sites[number]), "text": _text(sites[number], module)} for number, module in calls]
        for calls in called
    ]


def fields_of_site(site: CallSite) -> dict[str, Any]:
    """Fields of a call that have to be alike on all ranks. Sizes are numbers of elements: shapes may differ."""
    inputs, outputs = ([math.prod(shape) for shape in shapes] for shapes in (site.input_shapes, site.output_shapes))
    fields: dict[str, Any] = {"operation": site.operation, "dtype": ",".join(site.dtypes), "root": site.peer_rank}
    fields["reduction"] = site.reduction or "SUM"
    if site.operation in _ONE_SIZE | _PARTS:
        fields["sizes"] = inputs
    elif site.operation in _IN_AND_OUT:
        fields["sizes"] = inputs + outputs
    elif site.operation in _OUTPUTS:
        fields["sizes"] = outputs
    return fields


def main_place() -> str:
    """The position of the main thread: the innermost line of the user's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, *LIBRARIES)):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _text(site: CallSite, module: str) -> str:
    """Such as `all_gather_into_tensor of float32[4] -> [8] for blocks.1 at train.py:9 in step`."""
    user_frames = [frame for frame in site.stack if not frame.file.startswith((PACKAGE, *LIBRARIES))] or site.stack
    root = "" if site.peer_rank is None else f" with root {site.peer_rank}"
    tensors = f" of {site.tensors}" if site.tensors else ""
    tensors += f" for {module}" if module else ""
    return f"{site.title}{root}{tensors} at {user_frames[0] if user_frames else 'an unknown place'}"
