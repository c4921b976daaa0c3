"""The scenarios of `make slurm-test`, a function each."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.compose.project import until
from tests.slurm.cluster import NODE_TIMEOUT_S, Cluster, call
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy/slurm/gspo.sbatch"
# Half of the answers of a random model are rewarded. The pause leaves time to strike.
REWARD = """
import time

def reward(prompts, completions, answer, **columns):
    time.sleep(0.5)
    return [float(c[0]["content"][:1] < "P") for c in completions]
"""
_GSPO = (sys.executable, "-m", "gspo.cli")
_START_S, _STEP_S, _END_S = 240.0, 120.0, 180.0


class Stage:
    """A cluster, the model that all runs share, and the jobs that have been submitted.

    Args:
        start: That of the test, on the monotonic clock.
    """

    def __init__(self, cluster: Cluster, start: float) -> None:
        self.cluster, self._start = cluster, start
        self.model = cluster.folder / "model"
        make_tiny_model(self.model)

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        print(f"slurm-test: {time.monotonic() - self._start:4.0f} s  {text}", flush=True)

    def input(self, name: str, **sections: dict[str, object]) -> Path:
        """Write the input of a run; returns its configuration."""
        folder = self.cluster.folder / f"input-{name}"
        folder.mkdir()
        prompts = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "answer": str(2 * n)} for n in range(20)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
        (folder / "reward.py").write_text(REWARD)
        config: dict[str, object] = {
            "name": name,
            "model": {"path": str(self.model)},
            "data": {"prompts": "prompts.jsonl"},
            "reward": {"functions": [{"path": "reward.py"}]},
            "algorithm": {
                "prompt_length": 32,
                "response_length": 8,
                "rollout_batch_size": 4,
                "num_return_sequences_in_group": 4,
            },
            "generation": {"kv_cache_gb": 0.125, "max_rollouts": 16, "threads": 1},
            "run": {"directory": str(self.cluster.folder / "runs"), "checkpoint_every": 5},
            **sections,
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return folder / "config.yaml"

    def submit(self, config: Path, *words: str) -> SlurmJob:
        """Submit a run with the project's own batch file, with the options that a user would edit in it.

        Args:
            words: Further words for `gspo run`; or --wrap, which replaces the batch file.
        """
        cluster = self.cluster
        # This cluster has no GPUs and few cores.
        edited = ["--gpus-per-node=0", "--cpus-per-task=2", "--time=60", f"--output={cluster.folder}/%j.out"]
        batch = ["--nodes=2", *words] if words and words[0].startswith("--wrap") else [str(SBATCH), str(config), *words]
        command = ["sbatch", "--parsable", f"--chdir={cluster.folder}", *edited, *batch]
        number = cluster.login(*command).stdout.strip()
        keys = yaml.safe_load(config.read_text())
        return SlurmJob(cluster, number, Path(keys["run"]["directory"]) / keys["name"])


@dataclass(frozen=True)
class SlurmJob:
    """A submitted job, and the directory of its run."""

    cluster: Cluster
    number: str
    run_dir: Path

    @property
    def output(self) -> str:
        """The output of the batch script, of all its starts."""
        file = self.cluster.folder / f"{self.number}.out"
        return file.read_text() if file.exists() else ""

    def state(self) -> str:
        """Slurm's word for the job's state."""
        shown = self.cluster.login("scontrol", "show", "job", self.number).stdout
        return str(re.findall(r"JobState=(\w+)", shown)[0])

    def step(self) -> int:
        """The last step in the log."""
        return len(list(self.run_dir.glob("log/step-*.parquet")))

    def await_step(self, step: int, timeout_s: float) -> None:
        """Wait until a step is in the log.

        Raises:
            AssertionError: It is not in time, or the job has ended.
        """

        def reached() -> bool | None:
            assert self.state() in ("RUNNING", "PENDING"), f"job {self.number} is {self.state()}"
            return True if self.step() >= step else None

        until(f"step {step} of job {self.number}", reached, timeout_s)

    def await_state(self, state: str, timeout_s: float) -> None:
        """Wait for a state of the job."""

        def reached() -> bool | None:
            now = self.state()
            assert now in (state, "RUNNING", "PENDING", "COMPLETING"), f"job {self.number} is {now}"
            return True if now == state else None

        until(f"{state} of job {self.number}", reached, timeout_s)

    def await_output(self, text: str, timeout_s: float) -> None:
        """Wait for words of the batch script."""
        until(f"'{text}' of job {self.number}", lambda: True if text in self.output else None, timeout_s)

    def start_now(self) -> None:
        """Start a requeued job at once: Slurm lets it wait for two minutes."""
        self.cluster.login("scontrol", "update", f"JobId={self.number}", "StartTime=now")


def refusals(stage: Stage) -> None:
    """Input that cannot work ends the job with one message, before anything starts."""
    outside = stage.cluster.login(
        *_GSPO, "run", "--slurm", str(stage.input("outside", run=_run(stage, 3))), check=False
    )
    assert outside.returncode == 2, outside
    assert "needs the batch script of a Slurm job" in outside.stderr, outside.stderr
    venv, local = Path(sys.prefix), stage.cluster.local_disk
    # Each node has a local disk at this path.
    elsewhere = stage.input("elsewhere", run=_run(stage, 3) | {"directory": str(local / "runs")})
    large = stage.input("large", learner={"ranks": 3}, run=_run(stage, 3))
    missing = f"ln -s {venv} {local}/venv && exec {local}/venv/bin/python -m gspo.cli run --slurm {large}"
    jobs = {
        "n2 does not see what n1 writes": stage.submit(elsewhere),
        "learner.ranks: 3 ranks, equally many on each node, do not fit": stage.submit(large),
        f"n2: does not run {local}/venv/bin/python": stage.submit(large, f"--wrap={missing}"),
    }
    for words, job in jobs.items():
        job.await_state("FAILED", 120)
        assert words in job.output, f"no '{words}' in: {job.output}"
    stage.say("no Slurm, no shared disk, too few nodes, a node without gspo: refused")


def side_by_side(stage: Stage) -> None:
    """Two jobs on the same two nodes: one with ranks on both trains to its end, one is cancelled and continued."""
    first = stage.submit(stage.input("first", learner={"ranks": 2, "threads": 1}, run=_run(stage, 3)))
    config = stage.input("second", generation=_generators(2), learner={"threads": 1}, run=_run(stage, 1000))
    second = stage.submit(config)
    first.await_state("COMPLETED", _START_S + _END_S)
    assert first.step() == 3
    assert rank_nodes(first) == {"n1", "n2"}, rank_nodes(first)
    second.await_step(1, _START_S)
    apart(first, second)
    seen = stage.cluster.login(*_GSPO, "status", str(second.run_dir)).stdout
    assert "generation-1" in seen, f"gspo status on the login node: {seen}"
    stage.say("two jobs on the same nodes have trained, with no port or secret in common")
    stage.cluster.login("scancel", second.number)
    second.await_state("CANCELLED", _END_S)
    before = second.step()
    set_end(config, before + 2)
    third = stage.submit(config, "--resume")
    third.await_state("COMPLETED", _START_S + _END_S)
    assert second.state() == "CANCELLED"
    assert third.step() == before + 2
    stage.say(f"a job was cancelled at step {before} and stayed so; another one has continued its run")


def set_end(config: Path, step: int) -> None:
    """Let a run end after this step."""
    keys = yaml.safe_load(config.read_text())
    keys["run"]["total_steps"] = step
    config.write_text(yaml.safe_dump(keys))


def apart(*jobs: SlurmJob) -> None:
    """The jobs share no port and no secret, and other users cannot read the secrets."""
    seen: set[str] = set()
    for job in jobs:
        (folder,) = job.run_dir.glob("services/slurm-*")
        assert folder.stat().st_mode & 0o077 == 0
        own = {(folder / name).read_text() for name in ("token", "redis_password")}
        own |= {address.read_text() for address in folder.glob("address-*")}
        own.add(json.loads((job.run_dir / "services/supervisor.json").read_text())["redis_url"])
        assert not own & seen, "two jobs share a secret or an address"
        seen |= own


def rank_nodes(job: SlurmJob) -> set[str]:
    """The nodes of the learner's ranks, by the table that the batch script prints."""
    return set(re.findall(r"^learner-0  (\S+)", job.output, re.MULTILINE))


def losses(stage: Stage) -> None:
    """One job meets its time limit, loses its batch node, then the node of a generator, and trains on each time."""
    config = stage.input("losses", generation=_generators(2), learner={"threads": 1}, run=_run(stage, 1000))
    job = stage.submit(config)
    job.await_step(2, _START_S)
    meet_time_limit(stage, job)
    lose_batch_node(stage, job)
    lose_generator(stage, job)
    stage.cluster.login("scancel", job.number)
    job.await_state("CANCELLED", _END_S)
    steps = [json.loads(line)["step"] for line in (job.run_dir / "log/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)), f"steps in the log: {steps}"
    stage.say(f"the run has trained {len(steps)} steps, each once")


def lose_generator(stage: Stage, job: SlurmJob) -> None:
    """The node of a generator dies: the run continues with the other one."""
    stage.cluster.kill_node("n2")
    before = job.step()
    job.await_output("The run continues without it", NODE_TIMEOUT_S + 60)
    assert "generation-0 has ended: node n2 is lost" in job.output
    job.await_step(max(before, job.step()) + 2, _STEP_S)
    assert job.state() == "RUNNING"
    stage.cluster.start_node("n2")
    stage.say(f"a generator's node was lost at step {before}; the run is at step {job.step()}")


def meet_time_limit(stage: Stage, job: SlurmJob) -> None:
    """The time limit's signal: the run saves, the job requeues itself, and its next start continues the run."""
    shown = stage.cluster.login("scontrol", "show", "job", job.number).stdout
    (used_minutes,) = re.findall(r"RunTime=00:(\d\d):", shown)
    # Slurm announces the limit 300 s before it: at once.
    stage.cluster.login("scontrol", "update", f"JobId={job.number}", f"TimeLimit={int(used_minutes) + 4}")
    job.await_output("the job's time is over at step", 180)
    job.await_state("PENDING", 60)
    saved = job.step()
    assert (job.run_dir / f"checkpoints/step-{saved:06d}").exists(), "there is no checkpoint of the last step"
    stage.cluster.login("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    stage.cluster.await_idle()
    job.start_now()
    job.await_step(saved + 2, _START_S)
    stage.say(f"the time limit's signal stopped the run at step {saved}; it is at step {job.step()}")


def lose_batch_node(stage: Stage, job: SlurmJob) -> None:
    """The batch node dies: the other node requeues the job, and the run continues from its log."""
    stage.cluster.kill_node("n1")
    before = job.step()
    job.await_state("PENDING", NODE_TIMEOUT_S + 90)
    stage.cluster.start_node("n1")
    stage.cluster.await_idle()
    job.start_now()
    job.await_step(before + 2, _START_S)
    stage.say(f"the batch node was lost at step {before}; the run is at step {job.step()}")


def lose_rank(stage: Stage) -> None:
    """The node of a rank dies: the job requeues itself, and the run trains from its log to its end."""
    config = stage.input("rank", learner={"ranks": 2, "threads": 1}, run=_run(stage, 1000))
    job = stage.submit(config)
    job.await_step(1, _START_S)
    stage.cluster.kill_node("n2")
    job.await_output("node n2 is lost, and the run cannot go on without learner-0", NODE_TIMEOUT_S + 90)
    job.await_state("PENDING", 60)
    stage.cluster.start_node("n2")
    finish(stage, job, config)
    stage.say("the node of a rank was lost; the run has ended on both nodes")


def finish(stage: Stage, job: SlurmJob, config: Path) -> None:
    """Start a requeued job, which then trains two more steps to its end."""
    end = job.step() + 2
    set_end(config, end)
    stage.cluster.await_idle()
    job.start_now()
    job.await_state("COMPLETED", _START_S + _END_S)
    assert job.step() == end


def over_ssh(stage: Stage) -> None:
    """Without Slurm: `gspo run` on the first host, and both hosts' ranks by the command of docs/learner.md."""
    cluster, folder = stage.cluster, stage.cluster.folder / "ssh"
    folder.mkdir(mode=0o700)
    call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")])
    server = f"HostKey {folder}/key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
    (folder / "sshd_config").write_text(server)
    client = f"IdentityFile {folder}/key\nStrictHostKeyChecking no\nUserKnownHostsFile {folder}/known\n"
    (folder / "ssh_config").write_text(client)
    # The command calls `ssh`, which is to use no settings of this machine.
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (folder / "ssh").chmod(0o755)
    serve = 'mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec "$0" -D -e -f "$1"'
    for node in cluster.nodes:
        cluster.start(node, "sh", "-c", serve, shutil.which("sshd") or "sshd", str(folder / "sshd_config"))
    config = stage.input("ssh", learner={"ranks": 0, "threads": 1, "zero_stage": 3}, run=_run(stage, 3))
    run_dir = Path(_run(stage, 3)["directory"]) / "ssh"
    first = cluster.start("n1", *_GSPO, "run", "--plain", str(config))
    facts = run_dir / "services/supervisor.json"
    until("Redis", lambda: True if facts.exists() and "redis_url" in facts.read_text() else None, _START_S)
    command = documented_command(cluster.nodes, run_dir, json.loads(facts.read_text())["redis_url"])
    ranks = cluster.start("n1", "bash", "-c", command, PATH=f"{folder}:{sys.prefix}/bin:{os.environ['PATH']}")
    assert first.wait(_START_S + _END_S) == 0, (cluster.folder / "n1.output").read_text()[-3000:]
    assert ranks.wait(60) == 0
    assert len(list(run_dir.glob("log/step-*.parquet"))) == 3
    stage.say("torchrun over ssh: ranks on two hosts have trained to the end")


def documented_command(hosts: Sequence[str], run_dir: Path, redis_url: str) -> str:
    """The command of docs/learner.md for these hosts, with a rank on each."""
    blocks: list[str] = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "docs/learner.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (block,) = (text for text in blocks if text.startswith("hosts=("))
    _, _, rest = block.partition("\n")
    assert "--nproc-per-node 8" in rest
    settings = f"hosts=({' '.join(hosts)}) run={run_dir} redis={redis_url}\n"
    return settings + rest.replace("--nproc-per-node 8", "--nproc-per-node 1")


def _generators(replicas: int) -> dict[str, object]:
    return {"kv_cache_gb": 0.125, "max_rollouts": 16, "threads": 1, "replicas": replicas}


def _run(stage: Stage, steps: int) -> dict[str, Any]:
    return {"directory": str(stage.cluster.folder / "runs"), "checkpoint_every": 5, "total_steps": steps}


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "refusals": refusals,
    "side_by_side": side_by_side,
    "losses": losses,
    "lose_rank": lose_rank,
    "over_ssh": over_ssh,
}
