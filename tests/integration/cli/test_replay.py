"""`gspo replay` as a user calls it, on runs that the real trainer recorded: equal, altered, under other keys, killed.

What it is not: a test of the resume of a run, which tests/unit/learner/test_recovery.py has.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gspo.learner.storage.run_directory import RunDir
from tests.support.training.recorded_run import contents, record_run

pytestmark = pytest.mark.timeout(300)
_TIMEOUT_S = 240
# The figures of a step that training computes alone.
FIGURES = ("loss", "grad_norm", "clipped_sequences")


@dataclass(frozen=True)
class CommandResult:
    """The end of a call of `gspo replay`."""

    code: int
    printed: str
    errors: str

    @property
    def json(self) -> Any:
        return json.loads(self.printed)

    def value(self, step: int, name: str) -> Any:
        """A compared value of a step."""
        return next(of["values"][name] for of in self.json["steps"] if of["step"] == step)


def command(*words: object) -> list[str]:
    return [sys.executable, "-P", "-m", "gspo.cli", "replay", *map(str, words)]


def replay(*words: object) -> CommandResult:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return CommandResult(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Its log-probs are over sets, which a replay has from the log.
    return record_run(tmp_path_factory.mktemp("recorded"), sampling={"top_k": 12})


@pytest.fixture
def run_dir(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded run, with the times of its files."""
    return shutil.copytree(recorded, tmp_path / "run")


def test_replayed_steps_are_the_recorded_ones_to_the_bit_and_the_run_stays_as_it_is(run_dir: Path) -> None:
    before = contents(run_dir)
    done = replay(run_dir, "--steps", "4..6", "--json")
    assert done.code == 0, done.errors
    assert "4 steps to make, 3 to 6, from the checkpoint of step 2" in done.errors
    assert "s a step, about" in done.errors
    assert (done.json["equal"], done.json["exact"], done.json["rounding"]) == (True, True, [])
    versions = [json.loads(line) for line in (run_dir / "log" / "policy.jsonl").read_text().splitlines()]
    assert {version["version"]: version["digest"] for version in versions if version["version"] >= 2} == {
        step["step"]: step["values"]["digest"]["replayed"] for step in done.json["steps"]
    }
    for step in range(3, 7):
        assert all(done.value(step, name)["equal"] is True for name in ("digest", *FIGURES))
    assert contents(run_dir) == before

    # A second call has nothing to make: no process is started, and the answer is the same.
    log = run_dir / "replays" / "steps-4-6" / "services" / "replay.log"
    size = log.stat().st_size
    again = replay(run_dir, "--steps", "4..6")
    assert again.code == 0, again.errors
    assert "Equal: 4 steps are as recorded, to the bit." in again.printed
    assert "\x1b" not in again.printed
    assert (log.stat().st_size, contents(run_dir)) == (size, before)


def alter(run_dir: Path, step: int) -> None:
    """Change one advantage of a step file."""
    path = run_dir / "log" / f"step-{step:06d}.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index("advantage")
    values = table.column(place).to_pylist()
    values[3] += 0.25
    path.unlink()
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(values, pa.float64())), path)


def test_one_altered_number_is_found_at_its_step(run_dir: Path) -> None:
    alter(run_dir, 4)
    done = replay(run_dir, "--steps", "1..6", "--until-differs", "--json")
    assert done.code == 1, done.errors
    assert (done.json["start"], done.json["first_difference"]["step"]) == (0, 4)
    assert done.json["first_difference"]["name"] == "digest"
    assert done.value(3, "digest")["equal"] is True
    # An altered figure of the record is found too, though the digest is the recorded one.
    shutil.copy(run_dir / "log" / "metrics.jsonl", run_dir / "metrics.before")
    lines = (run_dir / "log" / "metrics.jsonl").read_text().splitlines()
    figures = json.loads(lines[2])
    figures["figures"]["grad_norm"] *= 1.0001
    lines[2] = json.dumps(figures)
    (run_dir / "log" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    done = replay(run_dir, "--steps", "1..6", "--until-differs")
    assert done.code == 1, done.errors
    assert "Differs: the first step that is not as recorded, to the bit, is 3: grad_norm was" in done.printed


def test_other_keys_train_the_same_rollouts_from_the_first_step_that_is_asked_for(run_dir: Path) -> None:
    before = contents(run_dir)
    keys = ("--with", "algorithm.pg_clip_high=0.5", "--with", "algorithm.pg_clip_low=0.5")
    done = replay(run_dir, "--steps", "2..3", *keys, "--json")
    assert done.code == 0, done.errors
    assert done.value(1, "digest")["equal"] is True, "the step before is as recorded"
    for name in ("sequences", "tokens", "reward_mean"):
        assert done.value(2, name)["difference"] == 0, "these are other rollouts"
    wider = done.value(2, "clipped_sequences")
    assert wider["recorded"] > wider["replayed"]
    assert done.value(2, "loss")["difference"] != 0
    assert done.value(3, "digest")["equal"] is False
    assert "Are as many sequences clipped?" in Path(done.json["plot"]).read_text()
    assert contents(run_dir) == before


def test_mini_batches_and_advantages_are_made_anew_from_the_logged_rewards(run_dir: Path) -> None:
    keys = ("--with", "algorithm.num_mini_batches=1", "--with", "algorithm.reward_shift=true")
    done = replay(run_dir, "--steps", "3", *keys, "--json")
    assert done.code == 0, done.errors
    rows = pq.read_table(run_dir / "log" / "step-000003.parquet").to_pandas()
    # One mini-batch is trained at the step's first weights, so nothing has moved yet.
    outside, start = (done.value(3, f"outside_clip_{name}") for name in ("sequences", "at_start"))
    assert outside["replayed"] == start["replayed"] and outside["recorded"] != start["recorded"]
    largest = (rows.reward - rows.groupby("group").reward.transform("mean")).max()
    assert done.value(3, "advantage_max")["replayed"] == pytest.approx(largest)


def test_a_run_that_trains_is_replayed_beside_its_learner(run_dir: Path) -> None:
    with RunDir(run_dir):  # as its learner has it: locked
        # Step 6 is logged and not yet on record, and a line is being written.
        log = run_dir / "log"
        for name in ("policy.jsonl", "metrics.jsonl"):
            lines = (log / name).read_text().splitlines(keepends=True)
            (log / name).write_text("".join(lines[:-1]) + lines[-1][:40])
        before = contents(run_dir)
        done = replay(run_dir, "--steps", "5..", "--json")
        assert done.code == 0, done.errors
        assert (done.json["start"], done.json["last"], done.json["equal"]) == (4, 5, True)
        assert contents(run_dir) == before


@pytest.mark.long
def test_a_killed_replay_goes_on_where_its_last_checkpoint_is(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    words = (run_dir, "--steps", "1..6", "--out", out)
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _TIMEOUT_S
    while not list(out.glob("checkpoints/step-00000[24]")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Its process stops after its present step by itself.
    lock = (out / "lock").read_text().split()[1]
    while Path(f"/proc/{lock}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{lock}").exists(), "the process goes on without its command"
    done = replay(*words, "--json")
    assert done.code == 0, done.errors
    assert f"Continuing in {out}" in done.errors
    assert [step["step"] for step in done.json["steps"]] == list(range(7))
    assert (done.json["equal"], (out / "checkpoints").exists()) == (True, False)


def _child(parent: int, module: str) -> int:
    """The process that runs a module, as a child of another, as soon as it has begun."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if module in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        time.sleep(0.02)
    raise TimeoutError(f"no child of {parent} runs {module} after {_TIMEOUT_S} s")


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.long
def test_ctrl_c_stops_after_a_step_and_the_same_command_continues(run_dir: Path) -> None:
    # A script's background starts commands with SIGINT ignored.
    process = subprocess.Popen(
        command(run_dir, "--steps", "1..6"), stdout=subprocess.PIPE, text=True, preexec_fn=_ignore_interrupts
    )
    trainer = _child(process.pid, "gspo.learner.replay")
    # Six small steps could end before the signal arrives.
    os.kill(trainer, signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], _TIMEOUT_S)[0], "Ctrl-C prints nothing"
    printed = next(line for line in process.stdout if "stopping after this step" in line)
    assert "with a checkpoint; Ctrl-C again stops at once" in printed
    os.kill(trainer, signal.SIGCONT)
    process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 130
    metrics = run_dir / "replays" / "steps-1-6" / "log" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) < 6
    done = replay(run_dir, "--steps", "1..6")
    assert done.code == 0, done.errors
    assert "Equal: 6 steps are as recorded" in done.printed


@pytest.mark.long
def test_a_loss_of_ones_own_is_replayed_from_the_runs_copy(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def loss(batch):\n    return -batch.advantage_BT * batch.logp_BT\n")
    algorithm = {"num_mini_batches": 2, "loss": {"path": str(path)}}
    run_dir = record_run(tmp_path, steps=2, checkpoints=(), algorithm=algorithm)
    path.unlink()
    done = replay(run_dir, "--steps", "1..2", "--json")
    assert done.code == 0, done.errors
    assert (done.json["equal"], done.json["exact"]) == (True, True)


@pytest.mark.long
def test_two_ranks_round_otherwise_and_repeat_their_own_bits(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    words = ("--steps", "1..2", "--with", "learner.ranks=2", "--json")
    done = replay(run_dir, *words, "--out", out)
    assert done.code == 0, done.errors
    assert (done.json["exact"], done.json["rounding"]) == (False, ["learner.ranks: 1 -> 2"])
    assert "Digests cannot be expected to be equal, so figures are compared" in done.errors
    assert done.value(1, "digest")["equal"] is None
    # The folder of a replay has the form of a run of two ranks.
    of_two = replay(out, "--steps", "1..2", "--json")
    assert of_two.code == 0, of_two.errors
    assert (of_two.json["exact"], of_two.json["equal"]) == (True, True)
    assert [path.name for path in (out / "replays").iterdir()] == ["steps-1-2"]
