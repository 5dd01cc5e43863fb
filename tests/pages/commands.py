"""The commands that pages show, without running them: programs and scripts are there, and know their flags.

Ours are asked for their help; a script's flags are looked for in the text of its folder.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.surroundings.launching import ROOT, environment

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

OURS = {"disttrain-flight": "disttrain.flight_recorder.cli", "disttrain-launch": "disttrain_launch"}
"""And the module that each runs."""
OTHERS = {"git", "kill", "mpirun", "openssl", "pip", "rm", "srun", ".", "cd", "kubectl", "sbatch", "scp", "ssh", "tail"}
"""Programs of others, whose flags are their own."""

_BETWEEN = re.compile(r"[|&;<>]+")


def problems(command: str, server: ForkServer) -> list[str]:
    """What is wrong with a line of commands; empty: nothing that can be seen without running it.

    Args: server  forks our programs, some of which load torch.
    """
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    each: list[list[str]] = [[]]
    for word in words:
        if _BETWEEN.fullmatch(word):
            each.append([])
        elif word != "...":
            each[-1].append(word)
    return [problem for one in each for problem in _problems_of_one(_without_variables(one), server)]


def _without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words


def _problems_of_one(words: list[str], server: ForkServer) -> list[str]:
    if not words:
        return []
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program in ("mpirun", "srun"):
        ours = next((place for place, word in enumerate(words) if word in OURS), len(words))
        return _problems_of_one(words[ours:], server)
    if program in OURS:
        return _of_ours(OURS[program], arguments, server)
    if program.startswith("python") and arguments[:1] == ["-m"]:
        if not arguments[1].startswith(("disttrain", "tests")):
            return []
        return _of_ours(arguments[1], arguments[2:], server)
    if program.startswith("python"):
        return _of_script(arguments) if arguments and arguments[0].endswith(".py") else []
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return [f"make {word}: no such target" for word in arguments if "=" not in word and word not in targets]
    return [] if program in OTHERS or (ROOT / program).is_file() else [f"{program}: no such program is known"]


def _of_ours(module: str, arguments: list[str], server: ForkServer) -> list[str]:
    script = next(
        (place for place, word in enumerate(arguments) if word.endswith(".py") or word == "-m"), len(arguments)
    )
    leading = tuple(itertools.takewhile(str.isalpha, arguments[:2]))  # perhaps a command of the program's
    flags = sorted({word.partition("=")[0] for word in arguments[:script] if re.match(r"--\w", word)})
    known, unknown = "", [f"{module}: no such program"]
    for count in range(len(leading), -1, -1):
        known += _help(server, module, *leading[:count])
        if known:
            unknown = [f"{module}: no flag {flag}" for flag in flags if not re.search(rf"{flag}\b", known)]
        if not unknown:
            break
    if arguments[script : script + 1] == ["-m"]:
        return [*unknown, *_of_ours(arguments[script + 1], arguments[script + 2 :], server)]
    return [*unknown, *_of_script(arguments[script:])]


def _of_script(words: list[str]) -> list[str]:
    if not words or words[0] == "train.py" or "/" not in words[0]:
        return []  # the reader's own
    path = ROOT / words[0]
    if not path.is_file():
        return [f"{words[0]}: no such file"]
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(path.parent.rglob("*.py")))
    flags = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    return [f"{words[0]}: no flag {flag}" for flag in flags if f'"{flag}"' not in text]


@cache
def _help(server: ForkServer, *command: str) -> str:
    """What the program says to --help; empty where it is no such command."""
    done = server.run("-m", *command, "--help", environ={**environment(), "COLUMNS": "200"})
    return done.stdout if done.returncode == os.EX_OK else ""


def missing_files(page: Path) -> set[str]:
    """Files of this repository that a page names, and that are not there."""
    folders = "benchmarks|disttrain|docs|examples|launcher|tests|tools"
    named = re.findall(rf"`[^`\n]*?((?:{folders})/[\w./-]+\.\w+)", page.read_text(encoding="utf-8"))
    return {path for path in named if not (ROOT / path).exists()}
