"""What jobs that end badly leave among the temporary files is bounded, and goes some day."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from disttrain.flight_recorder.dumps.folders import NUM_KEPT_JOBS, keep_dumps, private_folder
from disttrain.flight_recorder.dumps.rings.orphaned_rings import MAX_AGE_S, remove_forgotten
from disttrain.flight_recorder.record.ring.ring import Ring


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_dumps_of_the_last_jobs_are_kept(temporary: Path) -> None:
    for job in range(NUM_KEPT_JOBS + 2):
        dumps = temporary / "own" / "flight"
        dumps.mkdir(parents=True)
        (dumps / "rank-00000.flight").write_text(str(job))
        kept = keep_dumps(dumps, f"job{job}")
        # Files may be as old as the job's first dump; what counts is when they came here.
        os.utime(kept, (job, job))
        assert (kept / "rank-00000.flight").read_text() == str(job)
        assert kept.stat().st_mode & 0o777 == private_folder().stat().st_mode & 0o777 == 0o700
        assert not dumps.exists()
    assert sorted(folder.name for folder in private_folder().iterdir()) == [f"job{job}" for job in range(2, 7)]


def test_another_s_folder_is_left_alone(temporary: Path) -> None:
    private_folder().mkdir(mode=0o755)
    private_folder().chmod(0o755)
    (dumps := temporary / "flight").mkdir()
    with pytest.raises(PermissionError, match="is not this user's alone"):
        keep_dumps(dumps, "job")
    assert dumps.is_dir()


def test_rings_of_the_dead_go_after_days(temporary: Path) -> None:
    old_s = time.time() - MAX_AGE_S - 60
    lives = Ring(8, temporary / "rank-00000.live.ring")
    for name, changed_s in (("live", old_s), ("old", old_s), ("new", time.time())):
        for suffix in ("ring", "stacks"):
            file = temporary / f"rank-00000.{name}.{suffix}"
            file.touch()
            os.utime(file, (changed_s, changed_s))
    remove_forgotten(temporary)
    found = sorted(file.name for file in temporary.iterdir())
    assert found == [f"rank-00000.{name}.{suffix}" for name in ("live", "new") for suffix in ("ring", "stacks")]
    lives.close()
