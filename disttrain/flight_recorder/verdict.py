"""What the analyzer can conclude: a closed list of kinds, and a verdict with ranks, summary and evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Kind(StrEnum):
    """Why a job hangs or crawls, each with the exit code of `disttrain-flight` (2 is for wrong usage) and advice."""

    exit_code: int
    advice: str

    NOTHING_WRONG = "nothing_wrong", 0, "If the job hangs all the same, let it hang longer, dump again and compare."
    NOT_ENOUGH_DATA = "not_enough_data", 3, "Collect the dumps of all ranks, taken while the job hangs (kill -USR2)."
    RANK_ABSENT = (
        "rank_absent",
        10,
        "Look at what the absent rank does, and at its own log: the others only wait for it.",
    )
    WRONG_ORDER = "wrong_order", 11, "Make all ranks call the collectives of all groups in one order."
    MISMATCHED_OPERATION = (
        "mismatched_operation",
        12,
        "Look for a branch that ranks take differently above these lines.",
    )
    MISMATCHED_SIZES = "mismatched_sizes", 13, "Make the tensors equally large on all ranks; pad uneven parts."
    MISMATCHED_DTYPE = "mismatched_dtype", 14, "Convert the tensor to one dtype on all ranks."
    MISMATCHED_ROOT = "mismatched_root", 15, "Compute the root from what all ranks know alike."
    MISSING_SEND = "missing_send", 16, "Look for the send that belongs to this receive, and what comes before it."
    MISSING_RECEIVE = "missing_receive", 17, "Look for the receive that belongs to this send, and what comes before it."
    STRAGGLER = (
        "straggler",
        20,
        "Look at what this rank does between its collectives: data, logging, its device, its node.",
    )

    def __new__(cls, value: str, exit_code: int, advice: str) -> Self:
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.exit_code = exit_code
        kind.advice = advice
        return kind


@dataclass(frozen=True)
class Verdict:
    """One conclusion: `ranks` are those to blame, `evidence` what the dumps say, a sentence each."""

    kind: Kind
    ranks: tuple[int, ...]
    summary: str
    evidence: tuple[str, ...] = ()
