"""The ranks' parts of a checkpoint: a write continues with the file that failed; rank zero waits for whole files."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gspo.learner.storage.checkpoint_parts import BesideThread, GivenUpError, RankPart, wait_for_parts
from gspo.learner.storage.training_states import StatesFile

_NAMES = ("rank-00001-0000.safetensors", "rank-00001-0001.safetensors")


def files() -> list[StatesFile]:
    return [StatesFile(name, {"weight:a": torch.full([2], number)}, {"a": 0}) for number, name in enumerate(_NAMES)]


def test_a_part_continues_with_the_file_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = StatesFile.write, list[str]()

    def fill_disk(self: StatesFile, folder: Path) -> None:
        written.append(self.name)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, folder)

    monkeypatch.setattr(StatesFile, "write", fill_disk)
    part = RankPart(1, files())
    with pytest.raises(OSError, match="No space left"):
        part.write(tmp_path)
    RankPart(0, []).write(tmp_path)
    with pytest.raises(TimeoutError, match=r"rank 1 has not written .* learner\.rank_timeout_s \(0\.2 s\)"):
        wait_for_parts(tmp_path, 2, 0.2, lambda: False)
    part.write(tmp_path)
    wait_for_parts(tmp_path, 2, 5.0, lambda: False)
    assert written == [_NAMES[0], _NAMES[1], _NAMES[1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == list(_NAMES)
    assert [load_file(tmp_path / name)["weight:a"].tolist() for name in _NAMES] == [[0, 0], [1, 1]]


def test_rank_zero_waits_until_it_sees_the_whole_file_of_a_note(tmp_path: Path) -> None:
    """Another host's file may come later than its note, or grow, on a shared disk."""
    RankPart(0, []).write(tmp_path)
    RankPart(1, files()).write(tmp_path)
    whole = (tmp_path / _NAMES[1]).read_bytes()
    (tmp_path / _NAMES[1]).unlink()
    waiting = threading.Thread(target=wait_for_parts, args=(tmp_path, 2, 20.0, lambda: False), daemon=True)
    waiting.start()
    for present in (b"", whole[:-1]):
        (tmp_path / _NAMES[1]).write_bytes(present)
        waiting.join(0.2)
        assert waiting.is_alive()
    (tmp_path / _NAMES[1]).write_bytes(whole)
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_learner_that_ends_gives_up_what_other_ranks_owe(tmp_path: Path) -> None:
    with pytest.raises(GivenUpError, match="rank 0 has not written its part"):
        wait_for_parts(tmp_path, 1, 20.0, lambda: True)


def test_a_rank_ends_with_the_error_of_its_write() -> None:
    def refuse() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with BesideThread("checkpoint") as parts:
        parts.raise_error()
        parts.begin(refuse)
    with pytest.raises(OSError, match="Input/output error"):
        parts.raise_error()
