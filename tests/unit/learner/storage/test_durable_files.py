"""A disk that is really full: an interrupted write is whole once there is space, and no line is there twice."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo.common.telemetry.activity import Activity
from gspo.learner.assembly.rows import Row, row_from_scored
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding
from gspo.learner.storage.durable_files import DiskSpace
from gspo.learner.storage.run_directory import RunDir
from tests.unit.learner.conftest import MakeScored


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    assert os.geteuid() == 0, "only root can mount a disk of its own"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with filler.open("wb") as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    os.write(file.fileno(), b"\0" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return filler


@pytest.fixture
def rows(scored: MakeScored) -> Callable[..., list[Row]]:
    return lambda step, *groups: [replace(row_from_scored(scored(group)), step=step) for group in groups]


def test_writes_wait_for_free_disk_space_and_are_whole_then(small_disk: Path, rows: Callable[..., list[Row]]) -> None:
    activity = Activity("learner")
    activity.set("busy", "logging")
    disk = DiskSpace(activity)
    with RunDir(small_disk / "run", disk) as run:
        run.append_version(0, "before", "float32")
        filler = fill(small_disk)
        settled = [EndedGroup(group, GroupEnding.FAILED, "a reason" * 1000) for group in range(10, 20)]

        def write() -> None:
            run.settle(settled)
            run.write_step(1, rows(1, 1, 2))

        writing = threading.Thread(target=write)
        writing.start()
        deadline = time.monotonic() + 20
        while activity.what != "disk":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        activity_fields = activity.describe()
        assert activity_fields["kind"] == "waiting"
        assert "0.0 MiB are free" in str(activity_fields["detail"])
        assert len((small_disk / "run/log/settled.jsonl").read_bytes()) == 0
        filler.unlink()
        writing.join(30)
        assert not writing.is_alive()
        assert (activity.kind, activity.what) == ("busy", "logging")
    lines = [json.loads(line) for line in (small_disk / "run/log/settled.jsonl").read_text().splitlines()]
    assert [line["group"] for line in lines] == list(range(10, 20))
    with RunDir(small_disk / "run") as again:
        assert again.steplog.steps() == [1]
        assert [row.group for row in again.steplog.read(1)] == [1, 2]


def test_a_checkpoint_waits_for_free_space_also_where_its_unfinished_file_is_removed(small_disk: Path) -> None:
    """Less than the file, and more than a MiB, is free then."""
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    (small_disk / "filler").write_bytes(bytes(2**21))
    activity, target = Activity("learner"), small_disk / "rank.safetensors"
    tensors = {"weight": torch.zeros(3 * 2**18)}
    disk = DiskSpace(activity)
    writing = threading.Thread(
        target=disk.retry_until_written, args=("a checkpoint", small_disk, lambda: save_file(tensors, target))
    )
    writing.start()
    deadline = time.monotonic() + 20
    while activity.what != "disk":
        assert writing.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (small_disk / "filler").unlink()
    writing.join(30)
    assert load_file(target)["weight"].shape == tensors["weight"].shape


def test_a_learner_that_is_asked_to_end_does_not_wait(small_disk: Path) -> None:
    with RunDir(small_disk / "run", DiskSpace(Activity("learner"), stopping=lambda: True)) as run:
        fill(small_disk)
        with pytest.raises(OSError, match="No space left"):
            run.settle([EndedGroup(1, GroupEnding.FAILED, "a reason" * 10_000)])


def test_what_is_no_full_disk_is_raised_at_once(tmp_path: Path) -> None:
    disk, during = DiskSpace(Activity("learner")), list[bool]()

    def refuse() -> None:
        during.append(disk.is_writing)
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        disk.retry_until_written("a file", tmp_path, refuse)
    # The coordinator waits for a disk that answers late.
    assert (during, disk.is_writing) == ([True], False)
