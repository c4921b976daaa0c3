"""A replaced file and its folder, after a write that fails."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gspo.common.host import durable_write
from gspo.common.host.durable_write import replace_file


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "epoch"
    replace_file(path, b"old")

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable_write, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, b"new")
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == {"epoch": b"old"}
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
