"""Two runs and one GPU: locks by UUID, released with their process, and the message of the second run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.cli.processes.gpu_locks import find_holder, lock_gpus
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu

GPUS = [Gpu(str(n), f"GPU-{n}") for n in range(4)]
HOLDER = """
import sys
from pathlib import Path
from gspo.cli.processes.gpu_locks import lock_gpus
from gspo.common.host.machine import Gpu
with lock_gpus([Gpu("5", "GPU-1"), Gpu("MIG-GPU-9/1/0")], Path("/runs/first"), []):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_second_run_is_refused_until_the_first_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout and first.stdout.readline() == b"locked\n"
        holder = f"process {first.pid}, /runs/first"
        # By UUID: to the first run, the same GPU is GPU 5.
        with pytest.raises(InputError) as caught, lock_gpus(GPUS[:2], Path("/runs/second"), GPUS):
            pytest.fail("locked twice")
        assert str(caught.value) == (
            f"CUDA_VISIBLE_DEVICES: other runs keep 1 of 4 GPUs (GPU 1 by {holder}). End them, or choose among the 3 "
            "free GPUs: CUDA_VISIBLE_DEVICES=0,2,3"
        )
        assert [find_holder(gpu) for gpu in (*GPUS[:2], Gpu("MIG-GPU-9/1/0"))] == ["", holder, holder]
        with lock_gpus([GPUS[0], *GPUS[2:]], Path("/runs/second"), GPUS):
            assert find_holder(GPUS[2]) == f"process {os.getpid()}, /runs/second"
        first.kill()
        first.wait()
    with lock_gpus(GPUS, Path("/runs/second"), GPUS):
        assert find_holder(GPUS[1]) == f"process {os.getpid()}, /runs/second"
    assert not any(find_holder(gpu) for gpu in GPUS)


def test_without_gpus_nothing_is_written(runtime_dir: Path) -> None:
    with lock_gpus([], Path("/runs/one"), []):
        assert list(runtime_dir.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir / "missing"))
    with pytest.raises(InputError, match=r"missing/gspo: is the folder of the GPUs' locks, and cannot be written"):
        find_holder(GPUS[0])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(InputError, match=r"belongs to another user\. Set XDG_RUNTIME_DIR"):
        find_holder(GPUS[0])
