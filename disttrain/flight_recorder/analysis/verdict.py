"""The analyzer's conclusions: a closed list of kinds, and a verdict with ranks, summary and evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Cause(StrEnum):
    """Why a rank did not come, as far as its files tell, each with advice."""

    advice: str

    RAISED = "raised", "Mend the exception; the other ranks only wait for a rank that has ended."
    ENDED = "ended", "Its script made fewer calls: look at loops and branches whose length depends on the rank's data."
    DEAD = "dead", "Look at the node's kernel log (out of memory?), at the scheduler's, and for a core dump."
    STOPPED = "stopped", "Look for its process (state T: kill -CONT), a debugger, a frozen container, a lost node."
    HOLDS_LOCK = "holds_lock", "Let the C code at this line release the interpreter's lock, or end."
    IN_KERNEL = "in_kernel", "Look at what its GPU runs: nvidia-smi, dmesg (Xid), a kernel that does not end."
    IN_IO = "in_io", "Look at the other end of what it reads or writes: a file system, a worker process, a server."
    IN_PYTHON = "in_python", "Look at why it is at this line, or has not left it yet."
    CONNECTING = "connecting", "Look at the network between the ranks of this group, and who of them has not come."
    UNKNOWN = "unknown", "Look whether its process is there, and collect its dump: kill -USR2."

    def __new__(cls, value: str, advice: str) -> Self:
        cause = str.__new__(cls, value)
        cause._value_ = value
        cause.advice = advice
        return cause


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
    CROSSED_SENDS = (
        "crossed_sends",
        18,
        "Let one side receive first, or issue the sends and receives together (batch_isend_irecv).",
    )
    WAIT_CYCLE = "wait_cycle", 19, "Take one of these waits out of the circle: one order of all groups on all ranks."
    STRAGGLER = (
        "straggler",
        20,
        "Look at what this rank does between its collectives: data, logging, its device, its node.",
    )
    DIFFERENT_GROUPS = "different_groups", 21, "Let all members make the same groups, of the same ranks, in one order."
    NEVER_STARTED = (
        "never_started",
        22,
        "Look at what is queued before it on these GPUs: a kernel that does not end, an event that never comes.",
    )
    NETWORK = (
        "network",
        23,
        "Look at links, switches and firewalls between these hosts, at NCCL_DEBUG=INFO, dmesg (Xid), ibstat.",
    )
    MISMATCHED_REDUCTION = "mismatched_reduction", 24, "Give the same op on all ranks."

    def __new__(cls, value: str, exit_code: int, advice: str) -> Self:
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.exit_code = exit_code
        kind.advice = advice
        return kind


@dataclass(frozen=True)
class Verdict:
    """One conclusion: `ranks` are those to blame, `evidence` what the dumps say, a sentence each.

    `cause` says of ranks that are absent, or left out a message, what became of them.
    """

    kind: Kind
    ranks: tuple[int, ...]
    summary: str
    evidence: tuple[str, ...] = ()
    cause: Cause | None = None

    @property
    def advice(self) -> str:
        """The next thing to look at."""
        return self.cause.advice if self.kind is Kind.RANK_ABSENT and self.cause else self.kind.advice
