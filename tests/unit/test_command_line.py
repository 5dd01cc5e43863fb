"""A mistake in a command's line: one sentence, and the flag that was meant. And which version a program is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import disttrain
from disttrain.command_line import Parser
from disttrain.flight_recorder.cli import main as analyze
from disttrain_launch.cli import main as launch


def parser() -> Parser:
    made = Parser(prog="tool")
    made.add_argument("--ranks", type=int)
    show = made.add_subparsers(dest="command").add_parser("show")
    show.add_argument("--microbatches", type=int)
    return made


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--rank=4"], "tool: unrecognized arguments: --rank=4. Did you mean --ranks? See tool --help."),
        (
            ["show", "--micro=4"],
            "tool: unrecognized arguments: --micro=4. Did you mean --microbatches? See tool --help.",
        ),
        (["show", "--microbatch=4"], "tool: unrecognized arguments: --microbatch=4. Did you mean --microbatches? See"),
        (["--xyz"], "tool: unrecognized arguments: --xyz. See tool --help."),
        (["--ranks", "x"], "tool: argument --ranks: invalid int value: 'x'. See tool --help."),
        (["show", "--microbatches", "x"], "tool show: argument --microbatches: invalid int value: 'x'. See tool show"),
    ],
)
def test_a_mistake_is_one_line(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parser().parse_args(line)
    assert exited.value.code == 2
    told = capsys.readouterr()
    assert told.err.startswith(said)
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize("main", [launch, analyze])
def test_programs_say_their_version(main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"disttrain {disttrain.__version__}\n"
