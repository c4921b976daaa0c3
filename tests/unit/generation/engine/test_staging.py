"""Staging in shared memory: whole tensors, pieces, changes, and frames that do not fit."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from gspo.common.weights.changes import Packed, pack_changes
from gspo.common.weights.manifest import policy_digest
from gspo.generation.engine import staging
from gspo.generation.engine.staging import PolicyCopies, PolicyPlace, StagingError
from tests.support.tiny_model import make_tiny_model


def packed(new: list[int], old: list[int]) -> Packed:
    return pack_changes(np.array(new, np.uint16), np.array(old, np.uint16))


@pytest.fixture
def copies() -> PolicyCopies:
    copies = PolicyCopies({"a": (2, 3), "b": (4,)}, "bfloat16")
    copies.begin(changes=False)
    copies.write("a", 0, np.arange(6, dtype=np.uint16).tobytes())
    copies.write("b", 0, np.arange(4, dtype=np.uint16).tobytes())
    copies.promote()
    return copies


def test_a_push_changes_nothing_until_it_is_promoted(copies: PolicyCopies) -> None:
    before = copies.serving_digest()
    copies.begin(changes=True)
    assert copies.staged_digest() == before
    copies.change("a", 2, 3, packed([2, 3, 40], [2, 3, 4]))
    copies.change("a", 0, 1, packed([10], [0]))
    assert copies.serving.bits("a").tolist() == [0, 1, 2, 3, 4, 5]
    assert copies.staged.bits("a").tolist() == [10, 1, 2, 3, 40, 5]
    assert copies.serving_digest() == before != copies.staged_digest()
    copies.promote()
    assert copies.serving.bits("a").tolist() == [10, 1, 2, 3, 40, 5]


def test_after_any_pushes_the_staged_copy_has_the_fingerprints_of_its_bytes() -> None:
    chance, size = np.random.default_rng(0), 10_000
    copies = PolicyCopies({"a": (size,), "b": (3,)}, "bfloat16")
    expected = {"a": np.zeros(size, np.uint16), "b": np.zeros(3, np.uint16)}
    for number in range(12):
        whole, fails = number in (0, 7), number in (4, 9)
        new = expected["a"].copy()
        new[chance.random(size) < 0.02] = number
        copies.begin(changes=not whole)
        if whole:
            copies.write("b", 0, expected["b"].tobytes())
        if whole or number % 3 == 0:  # many changes to a run come as all of its elements
            copies.write("a", 0, new[:100].tobytes())
        else:
            copies.change("a", 0, 100, pack_changes(new[:100], expected["a"][:100]))
        if fails:
            continue
        if whole:
            copies.write("a", 100, new[100:].tobytes())
        else:
            copies.change("a", 100, size - 100, pack_changes(new[100:], expected["a"][100:]))
        expected["a"] = new
        tensors = [(name, "bfloat16", bits.shape, bits) for name, bits in expected.items()]
        assert copies.staged_digest() == policy_digest(tensors)
        copies.promote()
        assert all(copies.serving.bits(name).tolist() == bits.tolist() for name, bits in expected.items())


def test_a_full_push_that_leaves_a_tensor_out_has_another_digest(copies: PolicyCopies) -> None:
    copies.begin(changes=False)
    copies.write("a", 0, np.arange(6, dtype=np.uint16).tobytes())
    assert copies.staged_digest() != copies.serving_digest()
    copies.write("b", 0, np.array([0, 1], np.uint16).tobytes())
    copies.write("b", 2, np.array([2, 3], np.uint16).tobytes())
    assert copies.staged_digest() == copies.serving_digest()


def test_what_does_not_fit_is_refused(copies: PolicyCopies) -> None:
    copies.begin(changes=True)
    with pytest.raises(StagingError, match="no tensor 'c'"):
        copies.write("c", 0, b"\0\0")
    with pytest.raises(StagingError, match="b has 4 elements; 2 from 3"):
        copies.write("b", 3, b"\0\0\0\0")
    with pytest.raises(StagingError, match="b has 4 elements; 3 from 2"):
        copies.change("b", 2, 3, packed([1, 2, 3], [0, 0, 0]))
    with pytest.raises(StagingError, match="b from 1 on: the changes do not unpack"):
        copies.change("b", 1, 3, Packed(3, b"broken"))
    with pytest.raises(StagingError, match="whole elements"):
        copies.write("b", 0, b"\0\0\0")
    assert copies.staged_digest() == copies.serving_digest()


def test_another_process_reads_the_copy_by_its_path(copies: PolicyCopies) -> None:
    info = copies.serving.update_info()
    offset = next(place["offset"] for place in info["tensors"] if place["name"] == "b")
    assert Path(info["path"]).read_bytes()[offset : offset + 8] == np.arange(4, dtype=np.uint16).tobytes()


def test_a_folder_is_cast_as_torch_casts_it_and_a_tied_head_is_left_out(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=32, layers=1)
    whole, half = (PolicyCopies.from_folder(folder, dtype) for dtype in ("float32", "bfloat16"))
    assert "lm_head.weight" not in whole.places
    name = "model.layers.0.mlp.up_proj.weight"
    expected = torch.from_numpy(whole.serving.bits(name).view(np.float32)).bfloat16().view(torch.int16)
    assert half.serving.bits(name).view(np.int16).tolist() == expected.tolist()
    assert whole.serving_digest() != half.serving_digest()


def test_an_untied_head_is_part_of_the_policy(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=32, layers=1, tie_word_embeddings=False)
    assert "lm_head.weight" in PolicyCopies.from_folder(folder, "float32").places


def test_a_folder_without_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        PolicyCopies.from_folder(tmp_path, "float32")


@pytest.fixture
def file() -> Iterator[Path]:
    """As `gspo run` makes it."""
    number = os.memfd_create("policies")
    yield Path(f"/proc/{os.getpid()}/fd/{number}")
    os.close(number)


IN_COMMON = {"a": (1000,)}
_FILL = f"""
import sys
from pathlib import Path
from gspo.generation.engine import staging
from gspo.generation.engine.staging import PolicyPlace, PolicyCopies

copies = PolicyCopies({IN_COMMON}, "bfloat16", Path(sys.argv[1]))
assert copies.serving.is_whole
assert copies.find("next") is PolicyPlace.NOWHERE
copies.begin(changes=True)
copies.write("a", 0, b"12")
print("begun", flush=True)
sys.stdin.readline()
copies.write("a", 0, b"34")
copies.finish()
print(copies.staged_digest(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def filling(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Another generator's process, which has begun to fill a slot with the policy `next`."""
    command = [sys.executable, "-c", _FILL, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_a_killed_process_keeps_no_slot_and_what_it_began_is_never_loaded(file: Path) -> None:
    copies = PolicyCopies(IN_COMMON, "bfloat16", file)
    copies.serving.finish()
    with filling(file) as other:
        assert copies.find("next") is PolicyPlace.ELSEWHERE
        other.kill()
        other.wait()
        assert copies.find("next") is PolicyPlace.NOWHERE
    copies.begin(changes=True)
    assert len(copies._file) == 2
    assert copies.staged_digest() == copies.serving_digest()
    copies.close()


def test_a_stopped_process_is_not_waited_for_and_goes_on_in_its_own_slot(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = PolicyCopies(IN_COMMON, "bfloat16", file)
    copies.serving.finish()
    monkeypatch.setattr(staging, "_STILL_S", 0.2)
    with filling(file) as other:
        assert other.stdin is not None and other.stdout is not None
        other.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        assert copies.find("next") is PolicyPlace.NOWHERE
        copies.begin(changes=True)
        copies.write("a", 0, b"56")
        copies.finish()
        copies.promote()
        digest = copies.serving_digest()
        other.send_signal(signal.SIGCONT)
        print("", file=other.stdin, flush=True)
        of_other = other.stdout.readline().strip()
        assert bytes(copies.serving.bits("a")[:1]) == b"56" and copies.serving_digest() == digest != of_other
        assert copies.find(of_other) is PolicyPlace.HERE
        assert bytes(copies.staged.bits("a")[:1]) == b"34"
    copies.close()


def test_in_a_folder_each_model_has_a_file_which_stays_as_long_as_a_generator_loads_from_it(tmp_path: Path) -> None:
    small, large = {"a": (4,)}, {"a": (5,)}
    first = PolicyCopies(small, "bfloat16", tmp_path)
    first.serving.finish()
    second = PolicyCopies(large, "bfloat16", tmp_path)
    assert len([*tmp_path.iterdir()]) == 2
    assert PolicyCopies(small, "bfloat16", tmp_path).serving.is_whole
    assert not second.serving.is_whole
    second.close()
    third = PolicyCopies(small, "bfloat16", tmp_path)
    assert third.serving.is_whole
    assert [file.stat().st_ino for file in tmp_path.iterdir()] == [Path(third._file.path).stat().st_ino]


@pytest.mark.parametrize("trouble", ["no such file", "no locks"])
def test_without_a_file_in_common_a_generator_has_its_own(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = os.memfd_create("policies")

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    if trouble == "no locks":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    copies = PolicyCopies({"a": (4,)}, "bfloat16", Path("/proc/self/fd", str(number if trouble == "no locks" else 999)))
    assert copies.find("next") is PolicyPlace.NOWHERE
    copies.begin(changes=True)
    copies.write("a", 0, bytes(8))
    copies.promote()
    assert os.fstat(number).st_size == 0
    copies.close()
    os.close(number)
