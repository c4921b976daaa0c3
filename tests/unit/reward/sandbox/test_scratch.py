"""Folders that user code filled: measured to the byte, and removed with any content."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from gspo.reward.sandbox.inside.scratch import HIDDEN_BYTES, UNSEEN_BYTES, nameless_size, remove, size


def test_files_and_entries_count_and_links_do_not_lead_out(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "scratch"
    outside.write_bytes(bytes(2**20))
    (folder / "in").mkdir(parents=True)
    empty = size(folder)
    (folder / "in" / "file").write_bytes(bytes(2**16))
    (folder / "link").symlink_to(outside)
    assert 2**16 + 2 * 4096 <= size(folder) - empty < 2**17


def test_a_deep_folder_is_taken_for_full_and_removed(tmp_path: Path) -> None:
    top = tmp_path / "scratch"
    top.mkdir()
    before = Path.cwd()
    try:
        os.chdir(top)
        for _ in range(3000):  # beyond Python's stack, and beyond the longest path
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.chdir(before)
    assert size(top) == HIDDEN_BYTES
    remove(top)
    assert not top.exists()


def test_closed_folders_and_links_are_removed_and_nothing_outside(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    (outside / "file").touch()
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").touch()
    (top / "a" / "link").symlink_to(outside)
    os.mkfifo(top / "pipe")
    (top / "a" / "b").chmod(0o300)
    (top / "a").chmod(0)
    remove(top)
    assert not top.exists()
    assert (outside / "file").exists()
    remove(top)  # gone already


def test_files_that_are_open_and_removed_count(tmp_path: Path) -> None:
    def used_bytes() -> int:
        return nameless_size(os.getpid(), tmp_path)

    before = used_bytes()
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(bytes(2**16))
        assert used_bytes() == before
        (tmp_path / "file").unlink()
        assert used_bytes() >= before + 2**16
    assert used_bytes() == before


def test_a_removed_file_that_is_mapped_alone_counts_as_the_largest(tmp_path: Path) -> None:
    def used_bytes() -> int:
        return nameless_size(os.getpid(), tmp_path)

    before = used_bytes()
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(2**16))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 4096)  # it keeps a descriptor of its own, as the kernel's mmap does not
    (tmp_path / "file").unlink()
    assert before + 2**16 <= used_bytes() < before + UNSEEN_BYTES
    mapped.close()
    file_fd = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.truncate(file_fd, 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, file_fd, 0)
    os.close(file_fd)
    assert used_bytes() == before
    (tmp_path / "other").unlink()
    assert used_bytes() == before + UNSEEN_BYTES
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert libc.munmap(address, 4096) == 0
