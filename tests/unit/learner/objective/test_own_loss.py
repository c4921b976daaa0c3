"""A loss of the user's own: the examples in the real trainer, every rule of the trial, and the file of the run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.common.config.loading import write_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.telemetry.activity import Activity
from gspo.learner.objective.loss_file import check_own_loss, keep_loss_file, with_kept_loss
from gspo.learner.objective.loss_trial import made_up_batch, try_loss
from gspo.learner.objective.own_loss import LossError, OwnLoss, call_loss
from gspo.learner.recovery import restore
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.rank_control import RankZero
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import configured_hyperparameters
from gspo_core.stats import figures
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_config, make_rows, train

EXAMPLES = Path(__file__).parents[4] / "examples" / "losses.py"
RIGHT = "import torch\ndef loss(batch):\n    return -batch.advantage_BT * batch.logp_BT\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), scale=4.0)


def own(entry: str, path: Path = EXAMPLES, **keys: Any) -> dict[str, Any]:
    return {"loss": {"path": str(path), "entry": entry, **keys}}


def refused(tmp_path: Path, body: str) -> LossError:
    """The refusal of a function with this body by its trial."""
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\ndef loss(batch):\n    logp, mask = batch.logp_BT, batch.mask_BT\n    {body}\n")
    with pytest.raises(LossError) as caught:
        try_loss(path, "loss", reference=False)
    return caught.value


def test_gspo_written_again_trains_the_same_weights_to_the_bit(folder: Path) -> None:
    rows = make_rows(folder)
    built_in, written = (Trainer(make_config(folder, algorithm=keys), folder) for keys in ({}, own("gspo")))
    expected, seen = (train(trainer, 1, rows).metrics for trainer in (built_in, written))
    weights = written.engine.policy()
    assert all(torch.equal(weights[name], tensor) for name, tensor in built_in.engine.policy().items())
    assert (seen["loss"], seen["log_ratio_std"], seen["k3"]) == pytest.approx(
        (expected["loss"], expected["log_ratio_std"], expected["k3"])
    )
    # Nothing is clipped by a key: the shares are absent, and the function's own figures are there.
    assert {"clipped_tokens", "outside_clip_sequences", "noise_share", "dual_clipped_tokens"} <= expected.keys()
    assert not [name for name in seen if "clip" in name or "noise" in name]
    assert 0 < seen["loss_outside_mean"] < 1
    assert seen["loss_ratio_mean"] == pytest.approx(1.0, abs=0.01)


def test_the_cut_into_micro_batches_changes_no_loss_of_ones_own(folder: Path) -> None:
    rows, seen = make_rows(folder), []
    for tokens in (128, 100_000):
        config = make_config(folder, algorithm=own("gspo"), learner={"micro_batch_tokens": tokens})
        seen.append(train(Trainer(config, folder), 1, rows).metrics)
    for name in ("loss", "grad_norm", "loss_ratio_mean", "loss_outside_mean"):
        assert seen[0][name] == pytest.approx(seen[1][name], rel=1e-4, abs=1e-7), name


def test_rollouts_without_an_advantage_may_have_a_gradient(folder: Path, tmp_path: Path) -> None:
    """Under the built-in losses they have none, and skip the backward pass."""
    path = tmp_path / "imitate.py"
    path.write_text("def loss(batch):\n    return -batch.logp_BT\n")
    trainer = Trainer(make_config(folder, algorithm=own("loss", path)), folder)
    before = trainer.engine.policy()
    train(trainer, 1, [replace(row, advantage=0.0) for row in make_rows(folder)])
    assert not any(torch.equal(before[name], tensor) for name, tensor in trainer.engine.policy().items())


def test_a_function_without_memory_is_not_wrong(tmp_path: Path) -> None:
    """The step is tried again in smaller parts."""

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    batch: Any = None
    with pytest.raises(torch.OutOfMemoryError):
        call_loss(fail, batch, tmp_path)


def test_a_function_that_fails_in_training_ends_it_with_the_line(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "def loss(batch):\n    if len(batch.logp_BT) == 8:\n        raise ValueError('a wish')\n" + RIGHT[13:]
    )
    path.write_text(
        "def loss(batch):\n    wide = batch.logp_BT.shape[1] > 12\n"
        "    return -batch.logp_BT if not wide else unknown_name\n"
    )
    trainer = Trainer(make_config(folder, algorithm=own("loss", path)), folder)
    with pytest.raises(InputError, match=r"loss raised NameError: .*unknown_name.*\n .*late.py, line 3, in loss: "):
        train(trainer, 1, make_rows(folder))


@pytest.mark.parametrize(("entry", "reference"), [("gspo", False), ("reinforce", True)])
def test_the_examples_pass_the_trial(entry: str, reference: bool) -> None:
    try_loss(EXAMPLES, entry, reference=reference)


@pytest.mark.parametrize(
    ("body", "rule", "fix"),
    [
        ("return logp.sum(-1)", r"shape \[8\] and float32; its batch has \[8, 12\]", "for each token"),
        ("return None", "returned a loss of type NoneType", "for each token"),
        ("return logp > 0", "shape .* and bool", "floating-point"),
        ("return -logp, [logp]", "figures as list", "name: tensor"),
        ("return -logp, {'A b': logp}", "a figure named 'A b'", "a-z"),
        ("return -logp, {'mean': logp.mean()}", r"the figure mean of shape \[\]", "for each token"),
        ("return -logp, {f'x{n}': logp for n in range(33)}", "returned 33 figures", "at most 32"),
        ("return -logp.detach()", "no gradient in logp_BT", "without .detach"),
        ("return 0 * logp", "a gradient of zero at every token", "without .detach"),
        ("return -((4 * (logp - batch.old_logp_BT)).exp())", "gives a loss of -inf at a token that counts", "clamp"),
        ("return -((logp * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).expand_as(logp)",
         "gives a gradient of (nan|-?inf) at a token outside mask_BT", "clamp"),
        ("return -(logp + logp.sum(-1, keepdim=True))", "a gradient of .* at a token outside mask_BT", "torch.where"),
        ("return -logp * (1 + batch.entropy_BT.mean(-1, keepdim=True))",
         "not the same for other values outside mask_BT: the loss of a token was", "torch.where"),
        ("return -logp / logp.shape[1]", "not the same for more padding", "counted tokens"),
        ("return -torch.where(mask, logp, 0) * torch.where(mask, batch.advantage_BT, 0).std()",
         "not the same for more padding", "counted tokens"),
        ("return -(logp - torch.where(mask, logp, 0).sum() / mask.sum())",
         "a rollout of 12 token\\(s\\) alone: the loss of a token was", "own row alone"),
        ("return -logp * (1 + len(logp) / 800)", r"a rollout of 12 token\(s\) alone: the loss of a token was",
         "own row alone"),
        ("b = (torch.where(mask, logp, 0).sum() / mask.sum())\n    return -logp * (1 + b - b.detach())",
         "a rollout of 12 token\\(s\\) alone: the gradient of a token was", "own row alone"),
        ("return -logp, {'share': (torch.where(mask, logp, 0).sum() / mask.sum()).expand_as(logp)}",
         "a rollout of 12 token\\(s\\) alone: the figure share of a token was", "own row alone"),
        ("return -logp * torch.arange(1, len(logp) + 1)[:, None]", "in another order", "own row alone"),
        ("return -logp * torch.rand_like(logp)", "the same batch a second time", "random"),
        ("return -logp, ({'a': logp} if len(logp) > 1 else {})", "other figures for a rollout", "from every call"),
        ("batch.advantage_BT.clamp_(-1, 1)\n    return -logp * batch.advantage_BT", "changes batch.advantage_BT",
         "copy"),
        ("return -logp * (logp[mask].amax() < 9)", r"raised RuntimeError: amax.*, for a rollout of 0 token\(s\) alone",
         "line 4, in loss: return"),
        ("return missing(batch)", "raised NameError: name 'missing' is not defined", "line 4, in loss: return missing"),
    ],
)  # fmt: skip
def test_the_trial_names_the_rule_the_difference_and_the_fix(tmp_path: Path, body: str, rule: str, fix: str) -> None:
    error = refused(tmp_path, body)
    assert re.search(rule, error.rule, re.DOTALL), error.rule
    assert fix in error.fix


def test_a_loss_that_reads_the_reference_has_it_in_trial_and_training(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pulled.py"
    path.write_text("def pull(batch):\n    return (batch.logp_BT - batch.reference_BT) ** 2\n")
    with pytest.raises(LossError, match="raised TypeError"):
        try_loss(path, "pull", reference=False)
    try_loss(path, "pull", reference=True)
    # AdamW makes updates of the rounding in a gradient of 0.
    config = make_config(folder, algorithm=own("pull", path, reference=True), learner={"learning_rate": 1e-9})
    metrics = train(Trainer(config, folder), 1, make_rows(folder)).metrics
    # Policy and reference are the same, and the loss does not know the advantage.
    assert 0 <= metrics["loss"] < 1e-3
    assert metrics["reference_kl"] >= 0


def test_figures_are_means_over_counted_tokens(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def loss(batch):\n    return -batch.logp_BT, {'size': -batch.logp_BT}\n")
    batch = made_up_batch(reference=False).counted()
    _, stats = OwnLoss(path, "loss")(batch)
    expected = -float(batch.logp_BT[batch.mask_BT].double().mean())
    assert figures(stats) == {"loss_size_mean": pytest.approx(expected)}


@pytest.mark.parametrize(
    ("source", "rule", "fix"),
    [
        ("def loss(batch)\n    return 1\n", "cannot be run: File .* line 1 .*SyntaxError", "Correct the file"),
        ("import torch\nimport no_such_package\n", "cannot be run: ModuleNotFoundError", "line 2, in <module>"),
        ("def other(batch):\n    return 1\n", "has no function 'loss'", "It has: other"),
    ],
)
def test_a_file_that_cannot_be_run_names_its_line(tmp_path: Path, source: str, rule: str, fix: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(InputError, match=rule) as caught:
        OwnLoss(path, "loss")
    assert caught.value.where == "algorithm.loss.path"
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("body", "timeout_s", "rule"),
    [
        (
            "import time; time.sleep(20)\n    return -batch.logp_BT",
            3.0,
            "has not returned from a trial on small tensors within 3 s",
        ),
        ("import os; os._exit(3)", 60.0, "ended its process with exit code 3"),
        ("print('seen')\n    return batch.logp_BT.mean(-1)", 60.0, r"returned a loss of shape \[8\]"),
    ],
)
def test_the_check_before_the_start_has_a_process_and_a_deadline(
    folder: Path, tmp_path: Path, body: str, timeout_s: float, rule: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def loss(batch):\n    {body}\n")
    with pytest.raises(InputError, match=f"mine.py: loss {rule}"):
        check_own_loss(make_config(folder, algorithm=own("loss", path)), timeout_s=timeout_s)


def trained(folder: Path, tmp_path: Path) -> tuple[Config, Path, Path]:
    """A configuration, its file and its run directory after a first step."""
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    config = make_config(
        folder, algorithm=own("loss", path), run={"directory": str(tmp_path / "runs"), "total_steps": 3}
    )
    keep_loss_file(config, config.run_dir)
    (config.run_dir / "log").mkdir()
    (config.run_dir / "log" / "step-000001.parquet").touch()
    return config, path, config.run_dir


def test_a_run_trains_with_its_copy_and_a_resume_takes_no_other_file(folder: Path, tmp_path: Path) -> None:
    config, path, run_dir = trained(folder, tmp_path)
    assert (run_dir / "loss.py").read_text() == RIGHT
    assert with_kept_loss(config, run_dir).algorithm.loss.path == run_dir / "loss.py"
    path.write_text(RIGHT + "\n")
    keep_loss_file(config, run_dir)  # a restart within the run
    assert (run_dir / "loss.py").read_text() == RIGHT
    with pytest.raises(InputError, match=r"mine\.py has changed .* since the run began to train.*Set it back from"):
        check_own_loss(config)
    (run_dir / "loss.py").unlink()
    refusals: list[Callable[[], object]] = [lambda: keep_loss_file(config, run_dir), lambda: check_own_loss(config)]
    for refuse in refusals:
        with pytest.raises(InputError, match=r"loss\.py, the run's copy of .*mine.py, cannot be read"):
            refuse()


def test_a_file_that_changes_once_the_copy_is_made_changes_no_run(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def loss(batch):\n    return -batch.logp_BT, {'kept': batch.logp_BT}\n")
    config = make_config(folder, algorithm=own("loss", path), run={"directory": str(tmp_path), "total_steps": 1})

    def start(config: Config, model: Path, run_dir: Path) -> RankZero:
        path.write_text(RIGHT)
        return RankZero(config, model, run_dir)

    with RunDir(config.run_dir) as run:
        trainer, *_ = restore(config, folder, run, Activity("learner"), start)
    figures = trainer.train(1, make_rows(folder), (), configured_hyperparameters(config, 1)).metrics
    assert "loss_kept_mean" in figures


def test_a_start_that_trained_nothing_takes_the_newer_file(folder: Path, tmp_path: Path) -> None:
    config, path, run_dir = trained(folder, tmp_path)
    (run_dir / "log" / "step-000001.parquet").unlink()
    path.write_text(RIGHT + "\n")
    keep_loss_file(config, run_dir)
    assert (run_dir / "loss.py").read_text() == RIGHT + "\n"


def test_the_check_of_a_resume_with_another_file_exits_with_code_2(folder: Path, tmp_path: Path) -> None:
    config, path, run_dir = trained(folder, tmp_path)
    write_config(config, run_dir / "config.yaml")
    path.write_text(RIGHT + "\n")
    command = [sys.executable, "-P", "-m", "gspo.learner", "--check", str(run_dir / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"error: algorithm.loss.path: {path} has changed" in done.stderr
