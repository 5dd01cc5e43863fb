"""What the person at the terminal sees: a header, a progress bar, a summary. Without a terminal: plain lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disttrain.console import clock, short

BAR_INTERVAL_S = 0.1
LINE_INTERVAL_S = 10.0
"""How often there is a line where there is no terminal for a bar."""
NUM_TIMED_STEPS = 20


class Meter:
    """How far training is: averages over the last steps, and what they say about the rest.

    The first step of a process compiles, connects and allocates: it says nothing of the others, and until there is a
    second one nobody knows a rate.
    """

    def __init__(
        self, num_steps: int, first_step: int, tokens_per_step: int, *, eval_every: int, eval_batches: int
    ) -> None:
        self.num_steps = num_steps
        self.step = first_step
        self._tokens_per_step = tokens_per_step
        self._eval_every, self._eval_batches = eval_every, eval_batches
        self.load: float | None = None
        self._has_begun = False
        self._losses: deque[float] = deque(maxlen=eval_batches)
        self._times_s: deque[float] = deque(maxlen=NUM_TIMED_STEPS)
        self._evaluation_s: float | None = None
        self.waiting_share: float | None = None
        """How much of a step's time ranks wait for each other, by the last summary; None before the first."""

    def take_summary(self, summary: Mapping[str, Any]) -> None:
        """What the flight recorder says of the last steps."""
        self.waiting_share = summary["waiting_share"]

    def add(self, loss: float, time_s: float, load: float | None = None) -> None:
        """`load`: tokens of the busiest expert over the mean, where there are experts."""
        self.step += 1
        self.load = load
        self._losses.append(loss)
        if self._has_begun:
            self._times_s.append(time_s)
        self._has_begun = True

    def add_evaluation(self, time_s: float) -> None:
        """The fastest so far counts: the first one compiles."""
        self._evaluation_s = time_s if self._evaluation_s is None else min(self._evaluation_s, time_s)

    @property
    def loss(self) -> float | None:
        """The mean of as many batches as evaluations take; None before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: the median of the last ones, so that one that compiles again changes nothing; of an even
        number the lower. None before the second."""
        return median_low(self._times_s) if self._times_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None before the second step."""
        return None if self.step_s is None else self._tokens_per_step / self.step_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the end, with the evaluations that are to come; None before the second step."""
        if self.step_s is None:
            return None
        num_evaluations = 1 + len(range(-(-self.step // self._eval_every), -(-self.num_steps // self._eval_every)))
        # Of the same size, and without a backward: what takes longer has compiled.
        evaluation_s = min(self._evaluation_s or 0.0, self._eval_batches * self.step_s)
        return self.step_s * (self.num_steps - self.step) + evaluation_s * num_evaluations

    def status(self, memory_bytes: int) -> str:
        """All there is to know, in one line."""
        facts = [f"{self.step}/{self.num_steps}"]
        facts += [] if self.loss is None else [f"loss {self.loss:.3f}"]
        facts += [] if self.load is None else [f"experts' max/mean {self.load:.2f}"]
        facts += [] if self.tokens_per_s is None else [f"{short(self.tokens_per_s)} tokens/s"]
        facts.append(f"{short(memory_bytes)}B")
        facts += [] if self.left_s is None else [f"{clock(self.left_s)} left"]
        return " · ".join(facts)


class Screen:
    """Shows on rank 0; the other ranks' screens are silent.

    The bar is one line that ends in a carriage return, so that it works through the launcher, which prefixes lines.
    """

    def __init__(self, meter: Meter, *, is_shown: bool) -> None:
        self.console = Console(quiet=not is_shown, highlight=False, soft_wrap=False)
        self._meter = meter
        self._started_s = time.monotonic()
        self._shown_s = self._started_s
        self._interval_s = BAR_INTERVAL_S if self.console.is_terminal else LINE_INTERVAL_S
        self._bar = Text()

    def show_step(self, memory_bytes: int) -> None:
        """Bring the bar up to date, now and then."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._interval_s:
            return
        self._shown_s = now_s
        status = self._meter.status(memory_bytes)
        if not self.console.is_terminal:
            self._print(f"step {status}")
            return
        width = max(self.console.width - len(status) - 2, 0)
        done = width * self._meter.step // self._meter.num_steps
        self._bar = Text.assemble(("━" * done, "cyan"), ("━" * (width - done), "bright_black"), f" {status}")
        self._draw_bar()

    def show_evaluation(self, held_out_loss: float, words: str = "") -> None:
        """`words`: more of the last step."""
        training = "" if self._meter.loss is None else f"   training {self._meter.loss:.3f}"
        self._print(
            f"step {self._meter.step:>5}   held out [bold red]{held_out_loss:.3f}[/]{training}{words and '   ' + words}"
        )

    def show_continuation(self, prompt: str, continuation: str) -> None:
        """The prompt in another colour."""
        text = Text.assemble((readable(prompt), "bold magenta"), readable(continuation))
        if self.console.is_terminal:
            self.console.print(Panel(text, title="a continuation", title_align="left", border_style="magenta"))
        else:
            self.console.print("a continuation:", text, sep="\n", soft_wrap=True)

    def show_facts(self, title: str, facts: Mapping[str, str]) -> None:
        """A table of names and what they are."""
        if not self.console.is_terminal:
            lines = [title, *(f"  {name:<11} {fact}" for name, fact in facts.items())]
            self.console.print("\n".join(lines), soft_wrap=True, markup=False)
            return
        table = Table.grid(padding=(0, 3))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, fact in facts.items():
            table.add_row(name, Text(fact))
        self.console.print(Panel(table, title=f"[bold]{title}[/]", title_align="left", border_style="cyan"))

    def show_text(self, text: str) -> None:
        """As it stands."""
        self.console.print(text, markup=False, soft_wrap=True)

    def end_bar(self) -> float:
        """Remove the bar; returns the seconds since the screen was made."""
        self._erase_bar()
        self._bar = Text()
        return time.monotonic() - self._started_s

    def _print(self, line: str) -> None:
        self._erase_bar()
        self.console.print(line)
        self._draw_bar()

    def _draw_bar(self) -> None:
        if self._bar:
            self.console.print(self._bar, end="\r", no_wrap=True, overflow="crop")

    def _erase_bar(self) -> None:
        if self._bar:
            self.console.print(" " * (self.console.width - 1), end="\r")


def readable(text: str) -> str:
    """With marks for what cannot be printed, so that no control sequence reaches the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
