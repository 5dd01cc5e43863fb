"""A node's part in a job: wait for node 0's word and follow it, round after round, until there are no more."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from disttrain.errors import DisttrainError, RendezvousError
from disttrain_launch.output.failure.fates import fates
from disttrain_launch.output.failure.report import ending
from disttrain_launch.rendezvous.link import JobLink
from disttrain_launch.rendezvous.messages import Done, Refused, Run, Stop, Wait, Word
from disttrain_launch.rendezvous.node0 import SAY_EVERY_S, Say
from disttrain_launch.rendezvous.rounds import Assignment
from disttrain_launch.request.job import OPERATION, JobSpec
from disttrain_launch.workers.agent import Agent
from disttrain_launch.workers.outcome import Changed, Failed, Lost, Outcome, Succeeded
from disttrain_launch.workers.signals import SignalPipe

LEADER_SILENT_S = 30.0
"""The time after which a waiting node gives up a silent node 0."""


def take_part(
    spec: JobSpec, agent: Agent, link: JobLink, signals: SignalPipe, say: Say, explain: Callable[[int, Outcome], str]
) -> Done:
    """Run this node's workers whenever node 0 says so. Returns its last word.

    `explain` says on node 0 what is known of the end of a round that another follows, given its number and outcome.

    Raises RendezvousError when the node is refused, LaunchError when its workers cannot be started; the others know.
    """
    num_heard = 0
    last: Outcome | None = None
    last_assignment: Assignment | None = None
    while True:
        signals.interrupts = True
        num_heard, word = _next_word(link, num_heard, say)
        match word:
            case Run(assignment):
                if assignment.round > 0:
                    _say_round(spec, agent, last, word)
                if isinstance(last, Failed) and assignment.group_rank == 0:
                    agent.explanations.begin(partial(explain, agent.round, last))
                last, last_assignment = _run(agent, link, word), assignment
            case Stop(round, cause):
                # Perhaps it came before the workers were started, or after they had ended: for another cause, then.
                if round == agent.round and isinstance(last, Succeeded) and isinstance(cause, Failed):
                    # Others may have waited for what ended here.
                    _send_dumps(agent.dump_folder, last_assignment, link)
                link.stopped(round)
                last = cause if round == agent.round else last
            case Wait(reason):
                say(f"waiting {reason}")
            case Refused(problem, remedy):
                raise RendezvousError(OPERATION, problem, remedy)
            case Done():
                return word


def _run(agent: Agent, link: JobLink, word: Run) -> Outcome:
    try:
        outcome = agent.run(word)
    except (DisttrainError, OSError) as error:
        link.ended(agent.round, Lost(f"node {word.assignment.group_rank} could not start its workers: {error}"))
        link.stopped(agent.round)
        raise
    if isinstance(outcome, Failed):
        _send_dumps(agent.dump_folder, word.assignment, link)
    if not isinstance(outcome, Succeeded):
        # Who has ended well may yet be told to stop, and would be taken to have answered that before its dumps came.
        link.stopped(agent.round)
    return outcome


def _send_dumps(folder: Path, assignment: Assignment | None, link: JobLink) -> None:
    """Have node 0 get what workers of a round dumped here, unless this is node 0."""
    if assignment is None or assignment.group_rank == 0 or not folder.is_dir():
        return
    from disttrain_launch.output.failure.dump_exchange import pack  # only a job that fails needs it

    try:
        link.send_dumps(assignment.round, pack(folder, assignment.num_nodes))
    except OSError as problem:
        print(f"{OPERATION}: flight recorder: dumps cannot be sent to node 0: {problem}", file=sys.stderr)


def _next_word(link: JobLink, num_heard: int, say: Say) -> tuple[int, Word]:
    """Wait for it, saying meanwhile for whom, and no longer than node 0 lives."""
    began_s = changed_s = time.monotonic()
    num_said = -1
    while True:
        now_heard, word = link.wait(num_heard, SAY_EVERY_S)
        if word is not None and now_heard > num_heard:
            return now_heard, word
        now_s = time.monotonic()
        now_said, awaited = link.awaited()
        if now_said != num_said:
            num_said, changed_s = now_said, now_s
        elif now_s - changed_s >= LEADER_SILENT_S:
            return now_heard, Done(Lost(f"node 0 said nothing for {LEADER_SILENT_S:g} s; see its output."))
        if awaited:
            say(f"waiting for {awaited} ({now_s - began_s:.0f} s so far)")


def _say_round(spec: JobSpec, agent: Agent, last: Outcome | None, run: Run) -> None:
    """Tells the end of the last round, and this node's part in the next."""
    assignment = run.assignment
    is_told_elsewhere, text = assignment.group_rank > 0, ""
    if last is not None:
        text = fates(last, agent.output, agent.stopped_ranks, is_told_elsewhere=is_told_elsewhere)
        if isinstance(last, Changed):
            text += f"{OPERATION}: round {assignment.round - 1} ended: {last.change}.\n"
        else:
            text += ending(last, spec, is_told_elsewhere=is_told_elsewhere)
    nodes = f"{assignment.num_nodes} node{'s' if assignment.num_nodes > 1 else ''}"
    workers = f"{assignment.world_size} worker{'s' if assignment.world_size > 1 else ''}"
    restarts = f"; restart {run.num_restarts} of {spec.max_restarts}" if run.num_restarts else ""
    agent.output.mention(f"{text}{OPERATION}: round {assignment.round} begins: {nodes}, {workers}{restarts}\n")
