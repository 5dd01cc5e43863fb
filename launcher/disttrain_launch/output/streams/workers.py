"""All streams of a node's workers: which of them are kept, and which are shown under which prefix."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec

from disttrain import settings
from disttrain_launch.output.streams.holding import HoldingVoice, without_frames
from disttrain_launch.output.streams.logs import StreamPump, Voice, log_path, open_log
from disttrain_launch.output.streams.merging import Merger
from disttrain_launch.output.streams.streams import Streams
from disttrain_launch.output.terminal.screen import PlainVoice, Screen, prefixed, ranks_prefix, terminal_variables
from disttrain_launch.request.job import STDERR, STDOUT, STREAM_NAMES, JobSpec
from disttrain_launch.workers import last_words
from disttrain_launch.workers.worker import Worker


class Output(Streams):
    """Streams by local rank, as the job's LogPlan has them."""

    def __init__(self, spec: JobSpec, environ: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self._spec = spec
        self._environ = environ
        mergers = {screen: Merger(screen, partial(self._prefix, screen)) for screen in self.screens.values()}
        self._mergers = tuple(mergers.values())
        self._merger_of = {stream: mergers[screen] for stream, screen in self.screens.items()}
        self._holding: dict[int, HoldingVoice] = {}
        """By rank."""
        self.held: dict[int, str] = {}
        """By rank: what those that have ended said at last, and nobody has seen."""
        self.is_ending = False
        """Whether workers are being stopped: nothing is released any more."""

    def worker_variables(self) -> dict[str, str]:
        """Environment variables for workers that write here."""
        return terminal_variables(self.screens)

    def add(self, worker: Worker) -> None:
        """Take over a worker's streams. Raises LaunchError when a log file cannot be written."""
        for stream, fd in ((STDOUT, worker.stdout_fd), (STDERR, worker.stderr_fd)):
            self.add_pump(worker.local_rank, stream, self._make_pump(worker, stream, fd))

    def log_file(self, worker: Worker) -> str:
        """The path of the worker's stderr log; empty when there is none."""
        logs = self._spec.logs
        if logs.directory is None or not logs.keeps(worker.local_rank, STDERR):
            return ""
        return str(log_path(logs.directory, worker.rank, STREAM_NAMES[STDERR]))

    @property
    def holds(self) -> bool:
        """Whether last words are held back."""
        return self._spec.logs.holds

    @property
    def log_files(self) -> str:
        """The pattern of the paths of all workers' stderr logs; empty where there are none."""
        logs = self._spec.logs
        if logs.directory is None or not all(logs.keeps(rank, STDERR) for rank in range(self._spec.num_local_workers)):
            return ""
        return str(logs.directory / "rank-*" / f"{STREAM_NAMES[STDERR]}.log")

    def mention(self, text: str) -> None:
        """A message of the launcher's own that a quiet one keeps to itself."""
        if not self._spec.logs.is_quiet:
            self.say(text)

    @property
    def can_show_table(self) -> bool:
        """True when all streams end on one terminal that understands more than lines."""
        is_dumb = settings.TERMINAL.read(self._environ) == "dumb"
        is_one = self.screens[STDOUT] is self.screens[STDERR] and self.screens[STDOUT].is_terminal
        logs = self._spec.logs
        return is_one and not is_dumb and logs.has_prefixes and not logs.is_quiet and find_spec("rich") is not None

    def show_table(self, lines: Sequence[bytes]) -> None:
        self.screens[STDOUT].show_table(lines)

    def has_raised(self, besides: int) -> bool:
        """True when another rank than `besides` has printed an error of its own, and has not lived on since."""
        said = (voice.held for rank, voice in self._holding.items() if rank != besides)
        return any(last_words.is_own_error(held.decode("utf-8", "replace")) for held in said if held)

    def release(self, rank: int | None = None) -> None:
        """Show what this rank (None: each) has said at last."""
        for other, voice in self._holding.items():
            if voice.held and rank in (None, other):
                voice.release()

    def end_all(self) -> None:
        super().end_all()
        self.held = {
            rank: without_frames(text.decode("utf-8", "replace")) + "\n" for rank, text in self._take_held().items()
        }
        self.is_ending = False

    def show_held_back(self) -> None:
        """Show what all that have ended have said at last."""
        held, self.held = self.held, {}
        for rank, text in held.items():
            self.show_ended(rank, text)

    def show_ended(self, rank: int, text: str) -> None:
        """Show what a rank has said that has ended."""
        screen = self.screens[STDERR]
        screen.show_lines(prefixed(self._prefix(screen, (rank,)), text.encode("utf-8", "replace")))

    def _take_held(self) -> dict[int, bytes]:
        holding, self._holding = self._holding, {}
        return {rank: voice.held for rank, voice in holding.items() if voice.held}

    def move_due(self) -> float | None:
        """Show what was held back long enough. Returns: the seconds until more is due; None: nothing is held."""
        voices = () if self.is_ending else self._holding.values()
        for voice in voices:
            if voice.deadline_s is not None and time.monotonic() >= voice.deadline_s:
                voice.release()
        for merger in self._mergers:
            merger.release()
        due = (*self._mergers, *voices)
        times_s = [each.deadline_s for each in due if each.deadline_s is not None]
        return max(0.0, min(times_s) - time.monotonic()) if times_s else None

    def show_held(self) -> None:
        for merger in self._mergers:
            merger.flush()

    def _make_pump(self, worker: Worker, stream: int, fd: int) -> StreamPump:
        logs = self._spec.logs
        log_file = None
        if logs.directory is not None and logs.keeps(worker.local_rank, stream):
            log_file = open_log(log_path(logs.directory, worker.rank, STREAM_NAMES[stream]), self._spec.run_id)
        voice = self._voice(worker.rank, stream) if logs.shows(worker.local_rank, stream) else None
        if voice is not None and stream == STDERR and logs.holds:
            voice = self._holding[worker.rank] = HoldingVoice(voice)
        return StreamPump(
            fd,
            voice=voice,
            log_file=log_file,
            shows_bar=worker.rank == 0,
            say=self.say,
        )

    def _voice(self, rank: int, stream: int) -> Voice:
        if self._spec.logs.folds:
            return self._merger_of[stream].voice(rank)
        return PlainVoice(self.screens[stream], self._prefix(self.screens[stream], (rank,)))

    def _prefix(self, screen: Screen, ranks: Iterable[int]) -> bytes:
        if not self._spec.logs.has_prefixes:
            return b""
        return ranks_prefix(ranks, self._environ, is_terminal=screen.is_terminal)
