"""Finds plain tensors that should be equal on all ranks and are not: a save keeps one rank's. Torch-free.

They only warn: running averages of norms over each rank's own batches differ in every correct job with such norms.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash

_MOST_NAMED = 6


class Replicas(NamedTuple):
    """Tensors that the same ranks have: a number, equal on these ranks; the names; a digest of each."""

    number: int
    names: Sequence[str]
    digests: Sequence[bytes]

    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(b"".join(self.digests))

    def by_name(self) -> dict[str, bytes]:
        return dict(zip(self.names, self.digests, strict=True))


def digest_of_all(digests: Mapping[str, bytes]) -> bytes:
    """Equal for equal digests of the same names."""
    return xxhash.xxh3_128_digest(
        b"\0".join(part for name in sorted(digests) for part in (name.encode(), digests[name]))
    )


def differing_copies(digests_of_ranks: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Names, in order, under which ranks have different digests of one kind (the first byte). Digests of different
    kinds cannot be compared."""
    seen: dict[tuple[str, bytes], set[bytes]] = {}
    for digests in digests_of_ranks:
        for name, digest in digests.items():
            if digest:
                seen.setdefault((name, digest[:1]), set()).add(digest)
    return sorted({name for (name, _), different in seen.items() if len(different) > 1})


def warn_of_copies(differing: Sequence[str], *, are_mixed: bool = False) -> None:
    """One warning for all tensors that differ; `are_mixed`: it was found too late to keep one rank's of all."""
    if not differing:
        return
    named = ", ".join(map(repr, differing[:_MOST_NAMED]))
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    source = "some rank's of each part" if are_mixed else "those of the first rank that has them"
    warnings.warn(
        f"Plain tensors in the state differ among ranks, and the save keeps {source}: {named}{more}. Averages that"
        " norms keep do so; what else differs has gone apart. Make them alike before the save (by all_reduce, or"
        " broadcast), or wrap what each rank has its own of in PerRank.",
        RuntimeWarning,
        stacklevel=2,
    )
