"""The parts of `gspo run --slurm` around the run: refusals without Slurm, a job's secrets, the address of the ranks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from gspo.cli.slurm.allocation import Allocation, step
from gspo.cli.slurm.slurm_run import _job_folder, _write_job_config
from gspo.cli.slurm.task import rank_variables
from gspo.common.config.loading import read_config
from gspo.common.errors import InputError
from tests.support.service_process import make_run

SBATCH = Path(__file__).parents[4] / "deploy/slurm/gspo.sbatch"


def test_a_machine_without_slurm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"there is no srun on PATH\. Submit it: sbatch"):
        Allocation.from_environment({})


def test_a_shell_outside_a_job_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("srun", "scontrol", "squeue"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"SLURM_JOB_ID is not set\. Submit it: sbatch"):
        Allocation.from_environment({"SLURMD_NODENAME": "n1"})


def test_every_job_has_secrets_of_its_own_and_keeps_them_when_requeued(tmp_path: Path) -> None:
    config = make_run(tmp_path, tmp_path)
    files = []
    for job, requeues in (("7", 0), ("7", 1), ("8", 0)):
        folder = _job_folder(config, Allocation(job, ("n1", "n2"), requeues))
        services = read_config(_write_job_config(config, folder)).services
        assert services.host == "0.0.0.0"
        assert services.token_file and services.redis_password_file
        assert services.token_file.stat().st_mode & 0o077 == 0
        files.append((services.token_file.read_text(), services.redis_password_file.read_text()))
        assert len(files[-1][0]) >= 32
    first, again, other = files
    assert first == again
    assert not set(first) & set(other)
    assert first[0] != first[1]


def test_a_resume_by_a_new_job_leaves_the_secrets_of_the_old_one(tmp_path: Path) -> None:
    config = make_run(tmp_path, tmp_path)
    old = read_config(_write_job_config(config, _job_folder(config, Allocation("7", ("n1",)))))
    new = read_config(_write_job_config(old, _job_folder(config, Allocation("8", ("n1",)))))
    assert new.services.token_file != old.services.token_file
    users = make_run(tmp_path, tmp_path, services={"token_file": str(tmp_path / "mine")})
    kept = read_config(_write_job_config(users, _job_folder(config, Allocation("9", ("n1",)))))
    assert kept.services.token_file == tmp_path / "mine"


def test_all_ranks_take_the_address_that_the_first_one_writes(tmp_path: Path) -> None:
    def variables(rank: int, step: int) -> dict[str, str]:
        slurm = {"SLURM_STEP_ID": str(step), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}
        return rank_variables(tmp_path, slurm)

    other_step = variables(0, 2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(variables, 3, 3)
        first = variables(0, 3)
        later = waiting.result(30)
    assert (first.pop("RANK"), first.pop("LOCAL_RANK")) == ("0", "0")
    assert (later.pop("RANK"), later.pop("LOCAL_RANK")) == ("3", "1")
    assert first == later
    assert first["MASTER_PORT"] != other_step["MASTER_PORT"]


def test_a_step_takes_all_that_the_job_has_on_its_nodes() -> None:
    words = step(["n1", "n2"], tasks_a_node=4, name="learner-0")
    assert {"--overlap", "--mem=0", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--nodelist=n1,n2"} <= set(words)


def test_the_batch_file_asks_slurm_for_what_the_run_relies_on() -> None:
    text = SBATCH.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert options.keys() >= {"nodes", "gpus-per-node", "time", "requeue", "no-kill"}
    assert options["ntasks-per-node"] == "1"
    # A learner may take run.drain_timeout_s for its checkpoint, and 25 s more pass until all processes have ended.
    signal, _, seconds = options["signal"].partition("@")
    assert signal == "B:USR1"
    assert int(seconds) > 60 + 25
    # Without `exec` the shell would receive the signal.
    assert yaml.safe_load(text.splitlines()[-1]) == 'exec gspo run --slurm "$@"'
