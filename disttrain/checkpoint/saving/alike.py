"""Compares values that must be equal on all ranks, and raises one error where they are not. Torch-free.

Digests of their packed forms are compared first. Only if these differ are the values themselves described and compared,
since equal values may have different packed forms: a dict's order, the bits of a NaN, 1 and 1.0.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgpack
import xxhash

from disttrain.errors import CheckpointError

_TENSOR, _DTYPE, _TUPLE = 1, 3, 4
"""Extension types of packed values, see docs/checkpoint_format.md."""

Described = TypeVar("Described")

_MOST_NAMED = 4
_EXACT_BELOW = 1 << 53

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 40


class Group(NamedTuple):
    """Values that the same ranks have: a number, equal on these ranks; the names; and the packed list of values."""

    number: int
    names: Sequence[str]
    packed: bytes

    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(self.packed)

    def described(self) -> dict[str, list[Any]]:
        """Descriptions of the group's values by name, see `described`."""
        return {name: described(value) for name, value in zip(self.names, _unpacked(self.packed), strict=True)}


def shared_names(
    outlines: Sequence[Described], rank: int, names_of: Callable[[Described], Sequence[str]]
) -> list[tuple[int, list[str]]]:
    """Lists the values of `rank` that other ranks have as well: (group, names). Pure; a group is of the same ranks.

    `outlines` of the ranks, of which many may be one object: each is looked at once.
    """
    ranks_of: dict[int, list[int]] = {}
    for other, outline in enumerate(outlines):
        ranks_of.setdefault(id(outline), []).append(other)
    holders: dict[str, list[int]] = {}
    for ranks in ranks_of.values():
        for name in names_of(outlines[ranks[0]]):
            holders.setdefault(name, []).append(ranks[0])
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(holders):
        groups.setdefault(tuple(holders[name]), []).append(name)
    own_ranks = next(ranks for ranks in ranks_of.values() if rank in ranks)
    several = sorted(
        (firsts, names) for firsts, names in groups.items()
        if len(firsts) > 1 or len(ranks_of[id(outlines[firsts[0]])]) > 1
    )  # fmt: skip
    return [(number, names) for number, (firsts, names) in enumerate(several) if own_ranks[0] in firsts]


def differing_groups(digests_of_ranks: Sequence[Sequence[Sequence[Any]]]) -> list[int]:
    """The groups whose (number, digest) differ among ranks."""
    digests_of: dict[int, set[bytes]] = {}
    for digests in digests_of_ranks:
        for number, digest in digests:
            digests_of.setdefault(number, set()).add(digest)
    return sorted(number for number, different in digests_of.items() if len(different) > 1)


def described_values(packed: Mapping[str, bytes]) -> dict[str, list[Any]]:
    """Packed values by name, see `described`."""
    return {name: described(_unpacked(data)) for name, data in packed.items()}


def described(value: Any) -> list[Any]:
    """A digest that is equal for values that are alike, and some words, of an unpacked value."""
    digest = xxhash.xxh3_64_digest(msgpack.packb(_canonical(value)))
    text = _SHORT.repr(_readable(value))
    return [digest, text if "..." not in text else f"{text} (digest {digest.hex()[:8]})"]


def refuse_differing(operation: str, descriptions: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Raise CheckpointError where ranks that have a value by one name have different ones."""
    by_digest: dict[str, dict[bytes, tuple[str, list[int]]]] = {}
    for rank, by_name in enumerate(descriptions):
        for name, (digest, text) in by_name.items():
            by_digest.setdefault(name, {}).setdefault(digest, (text, []))[1].append(rank)
    differing = {name: list(ways.values()) for name, ways in sorted(by_digest.items()) if len(ways) > 1}
    if not differing:
        return
    named = "; ".join(
        f"{name!r} is " + ", ".join(f"{text} on {_listed(ranks)}" for text, ranks in ways[:_MOST_NAMED])
        for name, ways in list(differing.items())[:_MOST_NAMED]
    )
    more = f"; and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    remedy = "Wrap what each rank has its own of in PerRank (also an object with a state), or make it equal."
    if any(name.rpartition("/")[2] == "param_groups" for name in differing):
        remedy += " Optimizers of parts of a model: StateDictOptions(flatten_optimizer_state_dict=True)."
    raise CheckpointError(operation, f"values differ among ranks: {named}{more}.", remedy)


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def _canonical(value: Any) -> Any:
    """Equal for values that are alike."""
    if isinstance(value, float):
        if math.isnan(value):
            return msgpack.ExtType(0, b"nan")
        return int(value) if value.is_integer() and abs(value) < _EXACT_BELOW else value
    if isinstance(value, msgpack.ExtType):
        return ["tuple", *map(_canonical, _unpacked(value.data))] if value.code == _TUPLE else value
    if isinstance(value, dict):
        return ["dict", *sorted([msgpack.packb(_canonical(pair)) for pair in value.items()])]
    return ["list", *map(_canonical, value)] if isinstance(value, list | tuple) else value


def _readable(value: Any) -> Any:
    """The value in place of its packed form, as far as that goes without torch."""
    if isinstance(value, msgpack.ExtType):
        if value.code == _TUPLE:
            return tuple(map(_readable, _unpacked(value.data)))
        if value.code == _DTYPE:
            return _Words(f"torch.{value.data.decode()}")
        kind, shape, _ = _unpacked(value.data)
        return _Words(f"{'a tensor' if value.code == _TENSOR else 'an array'} of {kind}{list(shape)}...")
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    return list(map(_readable, value)) if isinstance(value, list) else value


class _Words(str):
    """Stands for itself, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
