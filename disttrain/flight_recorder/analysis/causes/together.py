"""Judges operations that all have entered alike and that do not end: a rank that came too late, a device that has not
begun, or the network. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.alignment.messages import message_key
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait
from disttrain.flight_recorder.analysis.waiting.waits import MIN_WAIT_S
from disttrain.flight_recorder.analysis.wording import arrival_lines, call_text, capitalized, location, waited_s
from disttrain.flight_recorder.record.record import Record, State, ranks_text


def find_all_entered(matched: Match, waits: Sequence[Wait]) -> list[Verdict]:
    """Finds an operation that all its ranks have entered, and that does not end; at most one verdict."""
    # An operation that some ranks have not come to is handled elsewhere.
    together = [wait for wait in waits if not wait.for_ranks]
    if not together:
        return []
    # Of operations of one replay, which have begun at one time, the last that a device has come to.
    first = min(
        reversed(together), key=lambda wait: wait.record.enqueued_s + (matched.dumps[wait.rank].clock_offset_s or 0.0)
    )
    record = first.record
    records = records_in(matched, first)
    evidence = tuple(arrival_lines(matched.dumps, records))
    late = _late(matched, records)
    if late:
        times_s = {rank: waited_s(matched.dumps[rank], record) for rank, record in records.items()}
        summary = f"{capitalized(ranks_text(late))} came to {call_text(record)} when others had waited for "
        summary += f"{max(times_s.values()) - max(times_s[rank] for rank in late):.1f} s and gave up."
        return [Verdict(Kind.STRAGGLER, tuple(sorted(late)), summary, evidence)]
    members = {first.rank, *((record.site.peer_rank,) if record.site.is_message else record.site.ranks)}
    if not members <= set(records):
        lost = ranks_text(rank for rank in members - set(records) if rank is not None)
        summary = f"All ranks that {call_text(record)} needs have entered it, as far as the counts tell; the records "
        summary += f"of {lost} do not reach back so far."
        return [Verdict(Kind.NOT_ENOUGH_DATA, (), summary, evidence)]
    queued = {rank: record for rank, record in records.items() if record.is_queued}
    if queued:
        return [never_started(matched, queued, evidence)]
    summary = f"All ranks that {call_text(record)} needs have entered it alike, and it does not end: the network, "
    summary += "the transport or a device holds it up."
    return [Verdict(Kind.NETWORK, tuple(sorted(records)), summary, evidence)]


def never_started(matched: Match, queued: Mapping[int, Record], evidence: Sequence[str]) -> Verdict:
    """The verdict for an operation that the devices of these ranks have not reached; `queued`: its records by rank."""
    record = next(iter(queued.values()))
    summary = f"{call_text(record)} has not begun on the device of {ranks_text(queued)}: what was queued before does "
    summary += f"not end. It was called at {location(matched.dumps[min(queued)], record.site.stack)}"
    lines = list(evidence)
    for rank, queued_record in list(queued.items())[:4]:
        records = matched.dumps[rank].records
        before = records[: records.index(queued_record)]
        come = [earlier for earlier in before if earlier.device is not None and earlier.device.came_s is not None]
        if come:
            last = come[-1]
            where = location(matched.dumps[rank], last.site.stack)
            lines.append(f"rank {rank}: the last that its device has come to before is {call_text(last)} at {where}")
    return Verdict(Kind.NEVER_STARTED, tuple(sorted(queued)), f"{capitalized(summary)}.", tuple(lines))


def records_in(matched: Match, wait: Wait) -> dict[int, Record]:
    """The records of all who have come, by rank."""
    record = wait.record
    if not wait.is_message:
        return dict(sorted(matched.collectives[record.site.group_name][record.sequence].records.items()))
    message = matched.messages[message_key(wait.rank, record)]
    ends = {message.src_rank: message.send, message.dst_rank: message.receive}
    return {rank: end for rank, end in sorted(ends.items()) if end is not None}


def _late(matched: Match, records: Mapping[int, Record]) -> list[int]:
    """The ranks that came when others had waited long, where some have given up."""
    times_s = {rank: waited_s(matched.dumps[rank], record) for rank, record in records.items()}
    longest_s = max(times_s.values())
    if longest_s < MIN_WAIT_S or not any(record.state is State.FAILED for record in records.values()):
        return []
    return [rank for rank, time_s in times_s.items() if time_s < longest_s / 2]
