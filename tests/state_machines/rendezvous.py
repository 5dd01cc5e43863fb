"""A job's nodes as a model around the rendezvous' state machine: no process, no store, any order of events.

What must always hold is asserted whenever node 0 speaks; `settle` plays to the end without further faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disttrain_launch.output.events import Chronicle
from disttrain_launch.output.view import JobState
from disttrain_launch.rendezvous.inherited import Inherited
from disttrain_launch.rendezvous.messages import (
    Came,
    Done,
    Ended,
    Formed,
    Refused,
    Report,
    Run,
    Stop,
    Stopped,
    Wait,
    Word,
)
from disttrain_launch.rendezvous.rounds import Assignment, Node, Phase, Terms
from disttrain_launch.rendezvous.state import Command, Event, NodeLost, Rendezvous, Tell, TimePassed
from disttrain_launch.workers.outcome import Failed, Interrupted, Outcome, Succeeded

LEADER = "a0"
MOST_STEPS = 500


def node(agent: str, node_rank: int | None = None, terms: Terms | None = None, **changes: object) -> Node:
    num_nodes = "3" if terms is None else f"{terms.min_nodes}:{terms.max_nodes}"
    same: dict[str, object] = {"num_nodes": num_nodes, "num_local_workers": 2, "version": "1.0", "host": f"h-{agent}"}
    return Node(agent, node_rank, **{**same, **changes})  # type: ignore[arg-type]


def failed(rank: int, returncode: int = 1, ran_s: float = 60.0) -> Failed:
    return Failed(rank, 0, 0, "host", 7, returncode, ran_s, "", "")


@dataclass
class Player:
    """A node: what it has heard and whether it has workers."""

    node: Node
    word: Word | None = None
    has_heard: bool = True
    """Whether it knows `word` yet."""
    running: int | None = None
    """The round of its workers."""
    has_failed: bool = False
    is_alive: bool = True


@dataclass
class Cluster:
    """Node 0's machine, the nodes, and what is on its way to node 0."""

    terms: Terms
    machine: Rendezvous = field(init=False)
    players: dict[str, Player] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    assignments: list[dict[str, Assignment]] = field(default_factory=list)
    """By round."""
    formed: Formed | None = None
    """As it lies in the store."""
    num_restarts: int = 0
    """As they are told."""
    given_up: set[str] = field(default_factory=set)
    now_s: float = 0.0
    leader: str = LEADER

    def __post_init__(self) -> None:
        leader = node(LEADER, 0, self.terms)
        self.machine = Rendezvous(self.terms, leader, 0.0)
        self.chronicle = Chronicle(JobState("job", 0.0, self.terms.max_restarts))
        self.come(leader)

    # What can happen.

    def come(self, newcomer: Node) -> None:
        self.players[newcomer.agent] = Player(newcomer)
        self.reports.append(Came(newcomer))

    def die(self, agent: str) -> None:
        self.players[agent].is_alive = False
        self.players[agent].running = None

    def fail(self, agent: str) -> None:
        """A worker of this node fails; the others are still being stopped."""
        player = self.players[agent]
        assert player.running is not None
        player.has_failed = True
        self.reports.append(Ended(agent, player.running, failed(self.assignments[player.running][agent].first_rank)))

    def stop(self, agent: str) -> None:
        """The last worker of this node is gone."""
        player = self.players[agent]
        assert player.running is not None
        self.reports.append(Stopped(agent, player.running))
        player.running, player.has_failed = None, False

    def succeed(self, agent: str) -> None:
        player = self.players[agent]
        assert player.running is not None
        self.reports += [Ended(agent, player.running, Succeeded()), Stopped(agent, player.running)]
        player.running = None

    def interrupt(self, agent: str) -> None:
        player = self.players[agent]
        player.has_failed = player.running is not None
        self.reports.append(Ended(agent, -1 if player.running is None else player.running, Interrupted(15, 0, "host")))

    def hear(self, agent: str) -> None:
        """The node learns the last word to it, and follows, once; it may have missed others."""
        player = self.players[agent]
        if player.has_heard:
            return
        player.has_heard = True
        match player.word:
            case Run(assignment) if player.running is None:
                player.running = assignment.round
            case Stop(round) if player.running is None:
                self.reports.append(Stopped(agent, round))
            case Stop() | Done():
                if player.running is not None:
                    self.stop(agent)

    @property
    def heirs(self) -> list[str]:
        """Who may take the leader's place."""
        return [
            agent
            for agent, player in self.players.items()
            if agent != self.leader and player.is_alive and isinstance(player.word, Run | Stop | Wait)
        ]

    def inherit(self, heir: str) -> None:
        """The leader dies, and its store's standby is on this node; what nobody has answered is said again."""
        lost, self.leader = self.leader, heir
        self.die(lost)
        self.given_up.add(lost)
        told = {agent: (player.node, player.word) for agent, player in self.players.items()}
        self.machine = Inherited(self.terms, self.players[heir].node, self.now_s, lost, told, self.formed)
        self.chronicle = Chronicle(JobState("job", 0.0, self.terms.max_restarts))
        nodes = [self.players[agent].node for agent in [*self.machine.everyone, lost]]
        self.chronicle.take_over(nodes, self.machine.gone, self.formed)
        self.reports += [Came(player.node) for player in self.players.values() if player.is_alive and not player.word]
        self.feed(TimePassed())

    def deliver(self) -> None:
        self.feed(self.reports.pop(0))

    def miss(self, agent: str) -> None:
        """Node 0 gives up this node."""
        self.given_up.add(agent)
        self.feed(NodeLost(agent))

    def pass_time(self) -> None:
        """Until the next deadline."""
        self.now_s = self.machine.deadline_s or self.now_s
        self.feed(TimePassed())

    # What must hold.

    def feed(self, event: Event) -> None:
        begun: dict[str, Assignment] = {}
        commands = self.machine.handle(event, self.now_s)
        self.check_chronicle(event, commands)
        for command in commands:
            if isinstance(command, Formed):
                self.formed = command
            if not isinstance(command, Tell):
                continue
            if isinstance(command.word, Run):
                begun[command.agent] = command.word.assignment
                assert command.word.num_restarts <= self.terms.max_restarts
            player = self.players[command.agent]
            player.word, player.has_heard = command.word, False
            if isinstance(command.word, Done) and self.machine.phase is not Phase.OVER:
                self.given_up.add(command.agent)
        if begun:
            self.check_round(begun)

    def check_chronicle(self, event: Event, commands: list[Command]) -> None:
        """Who follows along knows the same nodes, in the same places."""
        records = self.chronicle.follow(event, commands)
        state = self.chronicle.state(self.machine.phase, self.machine.awaited)
        if self.machine.phase is not Phase.OVER:
            assert {node.agent for node in state.nodes} == set(self.machine.everyone)
        for record in records:
            if record["event"] == "restart":
                self.num_restarts += 1
                assert record["restart"] == self.num_restarts
            if record["event"] == "round_formed":
                placed = sorted(node.group_rank for node in state.nodes if node.group_rank is not None)
                assert placed == [node["group_rank"] for node in record["nodes"]]

    def check_round(self, begun: dict[str, Assignment]) -> None:
        number = len(self.assignments)
        before = self.assignments[-1] if self.assignments else {}
        self.assignments.append(begun)
        assert {assignment.round for assignment in begun.values()} == {number}
        assert self.terms.min_nodes <= len(begun) <= self.terms.max_nodes
        ordered = sorted(begun.items(), key=lambda item: item[1].group_rank)
        first_rank = 0
        for group_rank, (agent, assignment) in enumerate(ordered):
            assert (assignment.group_rank, assignment.first_rank, assignment.num_nodes) == (
                group_rank,
                first_rank,
                len(begun),
            )
            first_rank += self.players[agent].node.num_local_workers
        assert {assignment.world_size for assignment in begun.values()} == {first_rank}
        assert ordered[0][0] == self.leader
        for agent in begun.keys() & before.keys() - {self.leader}:
            assert begun[agent].group_rank == before[agent].group_rank or before[agent].group_rank >= len(begun)
        assert not begun.keys() & self.given_up
        old = [player for player in self.players.values() if player.running is not None]
        assert {player.node.agent for player in old} <= self.given_up, "two rounds at once"

    # To the end.

    def settle(self) -> set[Outcome | str]:
        """No more faults: all comes to its end. Returns what the living were told at last."""
        for _ in range(MOST_STEPS):
            unheard = [agent for agent, player in self.players.items() if player.is_alive and not player.has_heard]
            is_over = self.machine.phase is Phase.OVER
            dead = [a for a in self.machine.agents if not self.players[a].is_alive and not is_over]
            ending = [a for a, player in self.players.items() if player.has_failed and player.running is not None]
            running = [a for a, player in self.players.items() if player.running is not None]
            if self.reports:
                self.deliver()
            elif unheard:
                self.hear(unheard[0])
            elif dead:
                self.miss(dead[0])
            elif ending:
                self.stop(ending[0])
            elif running and self.machine.phase is Phase.RUNNING:
                self.succeed(running[0])
            elif not is_over:
                assert self.machine.deadline_s is not None, f"all wait for ever in {self.machine.phase}"
                self.pass_time()
            else:
                return {self.last_word(player) for player in self.players.values() if player.is_alive}
        raise AssertionError(f"no end in sight: {self.machine.phase}")

    def last_word(self, player: Player) -> Outcome | str:
        assert player.running is None
        match player.word:
            case Done(outcome):
                return outcome
            case Refused(problem):
                return problem
        raise AssertionError(f"{player.node} was left with {player.word}")
