"""Ranks that met in one collective and called different things. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from disttrain.flight_recorder.analysis.match import Match, Meeting, Message
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.wording import came_lines, place
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import CallSite, Record, State, ranks_text

_EVEN: Final = {"all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"}
"""Operations whose tensors have the same number of elements on all ranks."""

_SITE_OF: Final = itemgetter(0)
_LOOKAHEAD: Final = 16
"""How many collectives later the same calls may come for it to be a matter of their order."""


def _sizes(site: CallSite) -> Hashable:
    if site.operation == "reduce":
        return site.num_input_elements  # only the root has an output
    return (site.num_input_elements, site.num_output_elements) if site.operation in _EVEN else None


# What must be alike, the most telling first.
_FIELDS: Final[tuple[tuple[Kind, str, Callable[[CallSite], Hashable]], ...]] = (
    (Kind.MISMATCHED_OPERATION, "different operations", lambda site: site.operation),
    (Kind.MISMATCHED_ROOT, "different roots", lambda site: site.peer_rank),
    (Kind.MISMATCHED_DTYPE, "different dtypes", lambda site: site.dtypes),
    (Kind.MISMATCHED_REDUCTION, "different reductions", lambda site: site.reduction),
    (Kind.MISMATCHED_SIZES, "different sizes", _sizes),
)


def find_mismatches(found: Match) -> list[Verdict]:
    """One verdict for the first such collective of each group, since what follows is shifted, and for each message."""
    verdicts = []
    known: dict[int, Hashable] = {}
    for meetings in found.meetings.values():
        for meeting in meetings.values():
            if _is_one_site(meeting):
                continue
            if len({_signature(record[0], known) for record in meeting.records.values()}) > 1:
                verdict = _collective(found, meeting)
            else:
                verdict = _parts(found, meeting)
            if verdict is not None:
                verdicts.append(verdict)
                break
    return verdicts + [verdict for message in found.messages.values() if (verdict := _message(found, message))]


def other_shapes(found: Match) -> list[str]:
    """Tensors of as many elements and other shapes: a sentence about the first such collective of each group.

    They may be meant to be so, and nothing hangs by them.
    """
    sentences = []
    for meetings in found.meetings.values():
        for meeting in meetings.values():
            ways: dict[Hashable, list[int]] = {}
            for rank, record in sorted(meeting.records.items()):
                ways.setdefault(_shapes(record.site), []).append(rank)
            if len(ways) > 1:
                calls = "; ".join(_call(found.dumps, meeting, ranks) for ranks in ways.values())
                sentences.append(f"ranks called other shapes, of as many elements, as {meeting.title}: {calls}")
                break
    return sentences


def _shapes(site: CallSite) -> Hashable:
    if site.operation == "reduce":
        return site.input_shapes
    return (site.input_shapes, site.output_shapes) if site.operation in _EVEN else None


def _parts(found: Match, meeting: Meeting) -> Verdict | None:
    """An all_to_all_single of which a rank sends another number of rows than the other expects."""
    sites = {rank: record.site for rank, record in meeting.records.items()}
    if not any(site.splits for site in sites.values()):
        return None
    rows = {rank: _rows(site) for rank, site in sites.items() if site.operation == "all_to_all_single"}
    for sender, (_, sent) in sorted(rows.items()):
        for receiver, (received, _) in sorted(rows.items()):
            num_sent, num_expected = sent[meeting.ranks.index(receiver)], received[meeting.ranks.index(sender)]
            if num_sent != num_expected:
                summary = (
                    f"Ranks called different sizes as {meeting.title}: rank {sender} sends {num_sent} rows to rank "
                )
                summary += f"{receiver}, which expects {num_expected}: "
                summary += "; ".join(_call(found.dumps, meeting, [rank]) for rank in dict.fromkeys((sender, receiver)))
                evidence = came_lines(found.dumps, meeting.records)
                blamed = tuple(sorted({sender, receiver}))
                return Verdict(Kind.MISMATCHED_SIZES, blamed, f"{summary}.", tuple(evidence))
    return None


def _rows(site: CallSite) -> tuple[Sequence[int], Sequence[int]]:
    """What a rank receives from each, and sends to each."""
    if len(site.splits) == 2 and all(len(rows) == len(site.ranks) for rows in site.splits):
        return site.splits[0], site.splits[1]
    received, sent = (
        shapes[0][0] // len(site.ranks) if shapes and shapes[0] else 0
        for shapes in (site.output_shapes, site.input_shapes)
    )
    return (received,) * len(site.ranks), (sent,) * len(site.ranks)


def divergence(found: Match, meeting: Meeting) -> list[str]:
    """The first collective before `meeting` that ranks called from different lines, as a line of evidence."""
    known: dict[int, str] = {}
    for earlier in found.meetings[meeting.group_name].values():
        if earlier.sequence >= meeting.sequence:
            break
        if _is_one_site(earlier):
            continue
        for rank, record in earlier.records.items():
            if id(record[0]) not in known:
                known[id(record[0])] = place(found.dumps[rank], record.site.stack)
        if len({known[id(record[0])] for record in earlier.records.values()}) > 1:
            places: dict[str, list[int]] = {}
            for rank, record in earlier.records.items():
                places.setdefault(known[id(record[0])], []).append(rank)
            ways = "; ".join(f"{ranks_text(ranks)} at {where}" for where, ranks in places.items())
            return [f"ranks called from different lines first in {earlier.title}: {ways}"]
    return []


def _is_one_site(meeting: Meeting) -> bool:
    """True when all ranks called the same from the same line; ranks whose dumps were read together share call sites."""
    return len(set(map(id, map(_SITE_OF, meeting.records.values())))) == 1


def _signature(site: CallSite, known: dict[int, Hashable]) -> Hashable:
    """All fields of a site. A dump has one object for all passes of a loop: `known` remembers by its address."""
    signature = known.get(id(site))
    if signature is None:
        signature = known[id(site)] = tuple(field(site) for _, _, field in _FIELDS)
    return signature


def _collective(found: Match, met: Meeting) -> Verdict | None:
    # Of a call that waits for others to connect, no tensors are known.
    came = {rank: record for rank, record in met.records.items() if record.state is not State.CONNECTING}
    meeting = replace(met, records=came)
    known: dict[int, Hashable] = {}
    if len({_signature(record.site, known) for record in came.values()}) <= 1:
        return None
    kind, what, field = next(
        entry for entry in _FIELDS if len({entry[2](record.site) for record in meeting.records.values()}) > 1
    )
    ways: dict[Hashable, list[int]] = {}
    for rank, record in sorted(meeting.records.items()):
        ways.setdefault(field(record.site), []).append(rank)
    to_blame = _odd_ones(found, meeting, list(ways.values()))
    if _is_swapped(found, meeting):
        kind, what = Kind.WRONG_ORDER, "the same collectives in different order"
    calls = "; ".join(_call(found.dumps, meeting, ranks) for ranks in ways.values())
    evidence = came_lines(found.dumps, meeting.records) + divergence(found, meeting)
    return Verdict(kind, tuple(to_blame), f"Ranks called {what} as {meeting.title}: {calls}.", tuple(evidence))


def _call(dumps: Mapping[int, Dump], meeting: Meeting, ranks: list[int]) -> str:
    site = meeting.records[ranks[0]].site
    root = "" if site.peer_rank is None else f" from rank {site.peer_rank}"
    call = f"{site.title}{root}{f' of {site.tensors}' if site.tensors else ''}"
    return f"{ranks_text(ranks)} {call} at {place(dumps[ranks[0]], site.stack)}"


def _odd_ones(found: Match, meeting: Meeting, ways: list[list[int]]) -> list[int]:
    """The minority. Where there is none: those whose call is new to the group while the others' is not; else all."""
    by_size = sorted(ways, key=len)
    if len(by_size[-1]) == len(by_size[-2]):
        stacks = {
            record.site.stack
            for sequence, earlier in found.meetings[meeting.group_name].items()
            if sequence < meeting.sequence
            for record in earlier.records.values()
        }
        new = [ranks for ranks in ways if not any(meeting.records[rank].site.stack in stacks for rank in ranks)]
        by_size = [*new, []] if 0 < len(new) < len(ways) else [*ways, []]
    return sorted(rank for ranks in by_size[:-1] for rank in ranks)


def _is_swapped(found: Match, meeting: Meeting) -> bool:
    """True when each rank's call is made by each other rank too, a little later or earlier."""
    meetings = found.meetings[meeting.group_name]
    known: dict[int, Hashable] = {}
    here = {_signature(record.site, known) for record in meeting.records.values()}
    for rank in meeting.records:
        near = [meetings.get(meeting.sequence + ahead) for ahead in range(_LOOKAHEAD)]
        called = {_signature(other.records[rank].site, known) for other in near if other and rank in other.records}
        if not here <= called:
            return False
    return True


def _message(found: Match, message: Message) -> Verdict | None:
    send, receive = message.send, message.receive
    if send is None or receive is None or send.state is receive.state is State.COMPLETED:
        return None
    if send.site.dtypes != receive.site.dtypes:
        kind, what = Kind.MISMATCHED_DTYPE, "dtypes"
    elif send.site.num_input_elements != receive.site.num_output_elements:
        kind, what = Kind.MISMATCHED_SIZES, "sizes"
    else:
        return None
    ends: dict[int, Record] = {message.src_rank: send, message.dst_rank: receive}
    return Verdict(
        kind,
        tuple(sorted(ends)),
        f"Different {what}: rank {message.src_rank} sends {send.site.tensors} where rank {message.dst_rank} receives "
        f"{receive.site.tensors}.",
        tuple(came_lines(found.dumps, ends)),
    )
