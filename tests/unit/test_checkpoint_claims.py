"""Claims of a directory, of processes that take turns in every order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from threading import Timer

import pytest

from disttrain.checkpoint import LocalStorage
from disttrain.checkpoint.storage import claims
from disttrain.checkpoint.storage.claims import Claim, check_claim
from disttrain.errors import CheckpointError
from tests.multirank.lockless_storage import LocklessStorage


class Processes:
    """Makes claims that seem to be of different processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self._monkeypatch = monkeypatch
        self.directory = directory
        self.storage = LocalStorage()

    def claim(self, process: str) -> Claim:
        made = Claim(self.storage, self.directory)
        self.become(process)
        made.ensure()
        return made

    def become(self, process: str) -> None:
        self._monkeypatch.setattr(claims, "_this_process", lambda: process * 16)

    def check(self, claim: Claim) -> None:
        check_claim(self.storage, self.directory, claim.name)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Processes:
    return Processes(monkeypatch, tmp_path / "runs")


def test_the_later_one_is_refused_and_leaves_nothing(processes: Processes) -> None:
    first = processes.claim("a")
    with pytest.raises(CheckpointError, match=rf"another job \(process {os.getpid()} on .*\) saves to .*runs as well"):
        processes.claim("b")
    assert sorted(os.listdir(processes.directory)) == [first.name, f"{first.name}.lock"]
    processes.check(first)
    first.close()
    first.close()
    assert os.listdir(processes.directory) == []
    processes.check(processes.claim("b"))


def test_claims_of_one_process_are_one_jobs(processes: Processes) -> None:
    first, second = processes.claim("a"), processes.claim("a")
    first.ensure()
    for claim in (first, second):
        processes.check(claim)
    first.close()
    processes.check(second)


def test_a_claim_goes_with_its_owner(processes: Processes) -> None:
    processes.claim("a")
    assert os.listdir(processes.directory) == []


def test_a_claim_that_outlives_its_owner_is_the_next_ones_to_remove(processes: Processes) -> None:
    claim = processes.claim("a")
    claim.outlive()
    name = claim.name
    del claim
    check_claim(processes.storage, processes.directory, name)  # its writer goes on
    second = processes.claim("b")
    with pytest.raises(CheckpointError, match="has taken over"):
        check_claim(processes.storage, processes.directory, name)
    processes.check(second)


def test_what_died_while_it_made_its_claim_is_the_next_ones_to_remove(processes: Processes) -> None:
    processes.directory.mkdir()
    (processes.directory / f".claim-000003.tmp-{'a' * 32}.new.lock").touch()
    claim = processes.claim("b")
    assert sorted(os.listdir(processes.directory)) == [claim.name, f"{claim.name}.lock"]


def test_a_fork_ends_no_claim(processes: Processes) -> None:
    claim = processes.claim("a")
    pid = os.fork()
    if pid == 0:
        claim.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    processes.check(claim)
    with pytest.raises(CheckpointError, match="as well"):
        processes.claim("b")


def test_without_locks_the_later_one_takes_over(processes: Processes) -> None:
    processes.storage = LocklessStorage()
    first = processes.claim("a")
    processes.check(first)
    second = processes.claim("b")
    with pytest.raises(CheckpointError, match=r"another job \(process \d+ on .*\) has taken over"):
        processes.check(first)
    processes.check(second)
    assert os.listdir(processes.directory) == [second.name]


def test_of_two_at_the_same_time_the_one_that_comes_first_in_order_stays(processes: Processes) -> None:
    """Both have made theirs before either looks at the other's."""
    first = processes.claim("a")
    (processes.directory / f"{first.name[:18]}{'c' * 32}").mkdir()  # one number, a later ID
    with processes.storage.hold(processes.directory / f"{first.name[:18]}{'c' * 32}"):
        processes.check(first)
        with pytest.raises(CheckpointError, match="as well"):
            processes.claim("b")


class Interrupted(LocalStorage):
    """Somebody else does something just before this job's claim is there."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    @contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        self._act()
        with super().hold(path):
            yield


@pytest.mark.parametrize("other", ["a", "c"])
def test_one_that_chose_the_same_number_and_has_looked_around_stays(processes: Processes, other: str) -> None:
    """Whichever of the two comes first in order."""
    made: list[Claim] = []

    def claim_as_well() -> None:
        processes.storage = LocalStorage()
        made.append(processes.claim(other))
        processes.become("b")

    processes.storage = Interrupted(claim_as_well)
    with pytest.raises(CheckpointError, match=r"another job \(process"):
        processes.claim("b")
    assert [claim.name[7:13] for claim in made] == ["000001"]
    processes.check(made[0])


@pytest.mark.parametrize("other", ["a", "c"])
def test_without_locks_one_of_two_at_the_same_time_stays(processes: Processes, other: str) -> None:
    made: list[Claim] = []

    class Lockless(LocklessStorage):
        def hold(self, path: Path) -> AbstractContextManager[None]:
            if not made:
                made.append(Claim(processes.storage, processes.directory))
                processes.become(other)
                made[0].ensure()
                processes.become("b")
            return super().hold(path)

    processes.storage = Lockless()
    made.append(processes.claim("b"))
    refused = []
    for claim in made:
        try:
            processes.check(claim)
        except CheckpointError as error:
            refused.append(error.problem)
    assert len(refused) == 1


def test_a_later_one_that_withdraws_is_waited_for(processes: Processes) -> None:
    later = processes.directory / f".claim-000001.tmp-{'f' * 32}"

    def claim_as_well() -> None:
        held = ExitStack()
        held.enter_context(LocalStorage().hold(later))
        later.mkdir()
        Timer(0.05, held.close).start()

    processes.storage = Interrupted(claim_as_well)
    processes.check(processes.claim("a"))


def test_of_many_at_once_one_stays(tmp_path: Path) -> None:
    for number in range(5):
        directory = tmp_path / f"{number}"
        (begin, beginning), (told, telling), (end, ending) = os.pipe(), os.pipe(), os.pipe()
        children = []
        for _ in range(4):
            children.append(os.fork())
            if children[-1] == 0:
                os.close(beginning)
                os.close(ending)
                os.read(begin, 1)
                claim = Claim(LocalStorage(), directory)
                try:
                    claim.ensure()
                    os.write(telling, b"1")
                except CheckpointError:
                    os.write(telling, b"0")
                os.read(end, 1)
                os._exit(0)
        os.close(beginning)
        answers = b"".join(os.read(told, 1) for _ in children)
        os.close(ending)
        for child in children:
            os.waitpid(child, 0)
        for descriptor in (begin, told, telling, end):
            os.close(descriptor)
        assert sorted(answers) == sorted(b"1000")
