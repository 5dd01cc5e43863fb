"""Finds ranks that came to one collective and called different things. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from disttrain.flight_recorder.analysis.alignment.collectives import Collective
from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.alignment.messages import Message
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.wording import arrival_lines, location
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import CallSite, Record, State, ranks_text

_EVEN: Final = {"all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"}
"""Operations whose tensors have the same number of elements on all ranks."""

_LOOKAHEAD: Final = 16
"""The most collectives by which the same calls may come later, to be taken for a different order."""


def _sizes(site: CallSite) -> Hashable:
    if site.operation == "reduce":
        return site.num_input_elements  # only the root has an output
    return (site.num_input_elements, site.num_output_elements) if site.operation in _EVEN else None


# The fields that must be equal, the most significant first.
_FIELDS: Final[tuple[tuple[Kind, str, Callable[[CallSite], Hashable]], ...]] = (
    (Kind.MISMATCHED_OPERATION, "different operations", lambda site: site.operation),
    (Kind.MISMATCHED_ROOT, "different roots", lambda site: site.peer_rank),
    (Kind.MISMATCHED_DTYPE, "different dtypes", lambda site: site.dtypes),
    (Kind.MISMATCHED_REDUCTION, "different reductions", lambda site: site.reduction),
    (Kind.MISMATCHED_SIZES, "different sizes", _sizes),
)


def find_mismatches(matched: Match) -> list[Verdict]:
    """One verdict for the first such collective of each group, since what follows is shifted, and message of each
    channel."""
    verdicts = []
    signatures: dict[int, Hashable] = {}
    for collectives in matched.collectives.values():
        for sequence, sites in collectives.mixed.items():
            verdict = None
            if len({_signature(site, signatures) for site, _ in sites.values()}) > 1:
                verdict = _collective(matched, collectives[sequence])
            elif any(site.splits for site, _ in sites.values()):
                verdict = _parts(matched, collectives[sequence])
            if verdict is not None:
                verdicts.append(verdict)
                break
    messages = matched.messages.first_unlike(lambda send, receive: _unlike_ends(send, receive) is not None)
    return verdicts + [verdict for message in messages if (verdict := _message(matched, message))]


def other_shapes(matched: Match) -> list[str]:
    """Tensors of as many elements and other shapes: a sentence about the first such collective of each group.

    They may be meant to be so, and nothing hangs by them.
    """
    sentences = []
    for collectives in matched.collectives.values():
        for sequence, sites in collectives.mixed.items():
            if len({_shapes(site) for site, _ in sites.values()}) == 1:
                continue
            collective = collectives[sequence]
            ways: dict[Hashable, list[int]] = {}
            for rank, record in sorted(collective.records.items()):
                ways.setdefault(_shapes(record.site), []).append(rank)
            if len(ways) > 1:
                calls = "; ".join(_call(matched.dumps, collective, ranks) for ranks in ways.values())
                sentences.append(f"ranks called other shapes, of as many elements, as {collective.title}: {calls}")
                break
    return sentences


def _shapes(site: CallSite) -> Hashable:
    if site.operation == "reduce":
        return site.input_shapes
    return (site.input_shapes, site.output_shapes) if site.operation in _EVEN else None


def _parts(matched: Match, collective: Collective) -> Verdict | None:
    """An all_to_all_single of which a rank sends another number of rows than the other expects."""
    sites = {rank: record.site for rank, record in sorted(collective.records.items())}
    rows = {rank: _rows(site) for rank, site in sites.items() if site.operation == "all_to_all_single"}
    index_of = {rank: index for index, rank in enumerate(collective.ranks)}
    receivers = [(rank, index_of[rank], received) for rank, (received, _) in rows.items()]
    for sender, (_, sent) in rows.items():
        sender_index = index_of[sender]
        for receiver, index, received in receivers:
            num_sent, num_expected = sent[index], received[sender_index]
            if num_sent != num_expected:
                summary = (
                    f"Ranks called different sizes as {collective.title}: rank {sender} sends {num_sent} rows to rank "
                )
                summary += f"{receiver}, which expects {num_expected}: "
                summary += "; ".join(
                    _call(matched.dumps, collective, [rank]) for rank in dict.fromkeys((sender, receiver))
                )
                evidence = arrival_lines(matched.dumps, collective.records)
                blamed = tuple(sorted({sender, receiver}))
                return Verdict(Kind.MISMATCHED_SIZES, blamed, f"{summary}.", tuple(evidence))
    return None


def _rows(site: CallSite) -> tuple[Sequence[int], Sequence[int]]:
    """The rows that a rank receives from each, and sends to each."""
    if len(site.splits) == 2 and all(len(rows) == len(site.ranks) for rows in site.splits):
        return site.splits[0], site.splits[1]
    received, sent = (
        shapes[0][0] // len(site.ranks) if shapes and shapes[0] else 0
        for shapes in (site.output_shapes, site.input_shapes)
    )
    return (received,) * len(site.ranks), (sent,) * len(site.ranks)


def divergence(matched: Match, collective: Collective) -> list[str]:
    """The first collective before `collective` that ranks called from different lines, as a line of evidence."""
    lines: dict[int, str] = {}
    collectives = matched.collectives[collective.group_name]
    for sequence, sites in collectives.mixed.items():
        if sequence >= collective.sequence:
            break
        for address, (site, rank) in sites.items():
            if address not in lines:
                lines[address] = location(matched.dumps[rank], site.stack)
        if len({lines[address] for address in sites}) > 1:
            earlier = collectives[sequence]
            ranks_at: dict[str, list[int]] = {}
            for rank, record in earlier.records.items():
                ranks_at.setdefault(lines[id(record.site)], []).append(rank)
            ways = "; ".join(f"{ranks_text(ranks)} at {where}" for where, ranks in ranks_at.items())
            return [f"ranks called from different lines first in {earlier.title}: {ways}"]
    return []


def _signature(site: CallSite, signatures: dict[int, Hashable]) -> Hashable:
    """All fields of a site. A dump has one object for all passes of a loop: `signatures` remembers by its address."""
    signature = signatures.get(id(site))
    if signature is None:
        signature = signatures[id(site)] = tuple(field(site) for _, _, field in _FIELDS)
    return signature


def _collective(matched: Match, full: Collective) -> Verdict | None:
    # Of a call that waits for others to connect, no tensors are known.
    arrived = {rank: record for rank, record in full.records.items() if record.state is not State.CONNECTING}
    collective = replace(full, records=arrived)
    signatures: dict[int, Hashable] = {}
    if len({_signature(record.site, signatures) for record in arrived.values()}) <= 1:
        return None
    kind, difference, field = next(
        entry for entry in _FIELDS if len({entry[2](record.site) for record in collective.records.values()}) > 1
    )
    ways: dict[Hashable, list[int]] = {}
    for rank, record in sorted(collective.records.items()):
        ways.setdefault(field(record.site), []).append(rank)
    to_blame = _minority(matched, collective, list(ways.values()))
    if _is_swapped(matched, collective):
        kind, difference = Kind.WRONG_ORDER, "the same collectives in different order"
    calls = "; ".join(_call(matched.dumps, collective, ranks) for ranks in ways.values())
    evidence = arrival_lines(matched.dumps, collective.records) + divergence(matched, collective)
    return Verdict(kind, tuple(to_blame), f"Ranks called {difference} as {collective.title}: {calls}.", tuple(evidence))


def _call(dumps: Mapping[int, Dump], collective: Collective, ranks: list[int]) -> str:
    site = collective.records[ranks[0]].site
    root = "" if site.peer_rank is None else f" from rank {site.peer_rank}"
    call = f"{site.title}{root}{f' of {site.tensors}' if site.tensors else ''}"
    return f"{ranks_text(ranks)} {call} at {location(dumps[ranks[0]], site.stack)}"


def _minority(matched: Match, collective: Collective, ways: list[list[int]]) -> list[int]:
    """The minority. If there is none, the ranks whose call is new to the group while that of the others is not; else
    all."""
    by_size = sorted(ways, key=len)
    if len(by_size[-1]) == len(by_size[-2]):
        stacks = matched.collectives[collective.group_name].stacks_before(collective.sequence)
        new = [ranks for ranks in ways if not any(collective.records[rank].site.stack in stacks for rank in ranks)]
        by_size = [*new, []] if 0 < len(new) < len(ways) else [*ways, []]
    return sorted(rank for ranks in by_size[:-1] for rank in ranks)


def _is_swapped(matched: Match, collective: Collective) -> bool:
    """True when each rank's call is made by each other rank too, a little later or earlier."""
    collectives = matched.collectives[collective.group_name]
    signatures: dict[int, Hashable] = {}
    current = {_signature(record.site, signatures) for record in collective.records.values()}
    near = [collectives.get(collective.sequence + ahead) for ahead in range(_LOOKAHEAD)]
    for rank in collective.records:
        called = {_signature(other.records[rank].site, signatures) for other in near if other and rank in other.records}
        if not current <= called:
            return False
    return True


def _unlike_ends(send: CallSite, receive: CallSite) -> tuple[Kind, str] | None:
    """Tells how the ends of a message differ."""
    if send.dtypes != receive.dtypes:
        return Kind.MISMATCHED_DTYPE, "dtypes"
    if send.num_input_elements != receive.num_output_elements:
        return Kind.MISMATCHED_SIZES, "sizes"
    return None


def _message(matched: Match, message: Message) -> Verdict | None:
    send, receive = message.send, message.receive
    unlike = None if send is None or receive is None else _unlike_ends(send.site, receive.site)
    if send is None or receive is None or unlike is None:
        return None
    kind, difference = unlike
    ends: dict[int, Record] = {message.src_rank: send, message.dst_rank: receive}
    return Verdict(
        kind,
        tuple(sorted(ends)),
        f"Different {difference}: rank {message.src_rank} sends {send.site.tensors} where rank {message.dst_rank} "
        f"receives {receive.site.tensors}.",
        tuple(arrival_lines(matched.dumps, ends)),
    )
