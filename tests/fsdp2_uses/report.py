"""What is told of a program that fails: the smallest one that fails likewise, as a script."""

from __future__ import annotations

from tests.fsdp2_uses.programs import Program
from tests.fsdp2_uses.run import Difference, check
from tests.fsdp2_uses.smaller import smaller
from tests.fuzz.shrinking import shrink

SCRIPT = """\
from tests.fsdp2_uses.programs import Node, Program, Shard, Use
from tests.fsdp2_uses.run import check

check(Program(
    mesh={program.mesh},
    model={model},
    uses=(
        {uses},
    ),
    seed={program.seed},
))"""


def difference_of(program: Program) -> Difference | None:
    """What it does otherwise, if anything. What else is raised is a fault of the program."""
    try:
        check(program)
    except Difference as difference:
        return difference
    return None


def report_of(program: Program) -> str | None:
    """None where the program does what it should."""
    first = difference_of(program)
    if first is None:
        return None

    def fails_alike(candidate: Program) -> bool:
        try:
            found = difference_of(candidate)
        except Exception:  # noqa: BLE001 -- a program that makes no sense, as of a weight that is shared beyond its group
            return False
        return found is not None and found.kind == first.kind

    small = shrink(program, fails_alike, smaller)
    said = difference_of(small) or first
    notes = " ".join(getattr(said, "__notes__", ()))
    return f"{said}\n{notes}\n\n{script_of(small)}"


def script_of(program: Program) -> str:
    """The program, to be run by itself from the repository's root."""
    uses = ",\n        ".join(map(repr, program.uses))
    return SCRIPT.format(program=program, model=program.model, uses=uses)
