"""Tells how each worker of a node ended, once it is known who is to blame: a line for those that another took along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disttrain_launch.output.streams.workers import Output
from disttrain_launch.request.job import OPERATION
from disttrain_launch.workers import last_words
from disttrain_launch.workers.outcome import Changed, Exit, Failed, Lost, Outcome


def fates(outcome: Outcome, output: Output, ranks: Iterable[int], *, is_told_elsewhere: bool) -> str:
    """A line for those of `ranks` that ended alike. What `output` holds of them is shown where it is of an error of
    their own, but for that of the culprit: it is said last, unless node 0 does so (`is_told_elsewhere`)."""
    is_broken = isinstance(outcome, Failed | Lost) or (isinstance(outcome, Changed) and not outcome.is_orderly)
    if not is_broken or not output.holds:
        output.show_held_back()
        return ""
    held, output.held = output.held, {}
    culprit = outcome.rank if isinstance(outcome, Failed) else None
    hidden = {}
    for rank, said in held.items():
        if is_told_elsewhere if rank == culprit else last_words.is_own_error(said):
            output.show_ended(rank, said)
        elif rank != culprit:
            hidden[rank] = said
    return _lines(_reason(outcome), [rank for rank in ranks if rank != culprit], held) + _folded(hidden, output)


def _lines(reason: str, ranks: Iterable[int], held: Mapping[int, str]) -> str:
    from disttrain.flight_recorder.record.record import ranks_text  # only a job that fails needs it

    alike: dict[str, list[int]] = {}
    for rank in ranks:
        said = held.get(rank, "")
        own_error = f"failed as well: {last_words.summary(said)}" if last_words.is_own_error(said) else ""
        alike.setdefault(own_error or f"stopped because {reason}", []).append(rank)
    return "".join(f"{OPERATION}: {ranks_text(those)}: {fate}\n" for fate, those in alike.items())


def _folded(hidden: Mapping[int, str], output: Output) -> str:
    num_lines = sum(said.count("\n") for said in hidden.values())
    if not num_lines:
        return ""
    where = f"are in {output.log_files}" if output.log_files else "are shown with --verbose"
    return f"    {num_lines} lines that they said of it {where}\n"


def _reason(outcome: Outcome) -> str:
    match outcome:
        case Failed():
            return f"rank {outcome.rank} failed: {outcome.summary or _end(outcome)}"
        case Lost(problem) | Changed(problem):
            return problem.rstrip(".")
        case _:
            return "the job ended"


def _end(failed: Failed) -> str:
    """How a rank ended that has raised nothing. `sys.exit` and argparse say why in a line."""
    end = Exit(failed.returncode)
    said = last_words.last_line(failed.last_lines) if failed.returncode > 0 else ""
    return f"{end}, last on stderr: {said}" if said else str(end)
