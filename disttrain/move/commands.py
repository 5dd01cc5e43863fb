"""Commands of torch's in shell scripts, manifests and notebooks: they are told, never changed."""

from __future__ import annotations

import re

from disttrain.move.findings import Finding

_LAUNCH = "disttrain-launch takes the same flags"
_COMMANDS = (
    (r"\btorchrun\b", _LAUNCH, "docs/launching.md"),
    (r"\btorch\.distributed\.(?:run|launch)\b", _LAUNCH, "docs/launching.md"),
    (r"\btorchfrtrace\b", "disttrain-flight reads torch's dumps, too", "docs/flight_recorder.md"),
    (
        r"\btorch\.distributed\.checkpoint\.format_utils\b",
        "python -m disttrain.checkpoint convert, both ways",
        "docs/moving_over.md#programs",
    ),
    (
        r"\bTORCH_(?:NCCL|FR)_(?:TRACE_BUFFER_SIZE|BUFFER_SIZE|DUMP_ON_TIMEOUT)\b",
        "Nothing to set: the recorder is on in every job",
        "docs/flight_recorder.md",
    ),
    (r"\bTORCH_DISTRIBUTED_DEBUG\b", "DISTTRAIN_DEBUG", "docs/settings.md"),
    (r"\btorch\.distributed(?:\.\w+)*", "Only files of Python are changed", "docs/moving_over.md#what-is-left-to-you"),
)


def told_commands(text: str) -> tuple[Finding, ...]:
    """Of each line the first of each command; lines that are comments of a shell's are passed over."""
    findings = []
    for line, words in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        if words.lstrip().startswith("#"):
            continue
        taken: list[tuple[int, int]] = []
        for pattern, why, page in _COMMANDS:
            match = re.search(pattern, words)
            if match is not None and not any(start <= match.start() < end for start, end in taken):
                taken.append(match.span())
                findings.append(Finding(line, match[0], why, page))
    return tuple(findings)
