"""One whole synchronous run with every real part, started as a user starts it, and its log read back.

Not here: learning (the demo shows it), failures (chaos tests). Three steps of a tiny model are enough for the books.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import psutil
import pytest
import torch
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from transformers import AutoModelForCausalLM

from gspo.common.weights.manifest import policy_digest
from gspo.runlog.token_ledger import LEDGER, LedgerRecord
from tests.integration.run.conftest import (
    BEHAVIOR_HIGH,
    BEHAVIOR_LOW,
    CLIP_HIGH,
    CLIP_LOW,
    GROUPS,
    LEARNING_RATE,
    SIZE,
    STEPS,
)
from tests.support.gspo_run import WholeRun
from tests.support.typed.gradients import backward

pytestmark = pytest.mark.timeout(600)


def test_a_function_replaced_in_the_middle_is_in_the_log(run: WholeRun, versions: list[str]) -> None:
    first, second = versions
    assert {row["reward_version"] for row in run.rows(1)} == {first}
    assert {row["reward_version"] for row in run.rows(STEPS)} == {second}
    assert {row["reward"] for row in run.rows(1)} <= {0.0, 1.0}
    assert {row["reward"] for row in run.rows(STEPS)} <= {0.0, 2.0}


def test_a_healthy_run_logs_no_warning(run: WholeRun) -> None:
    logs = sorted((run.run_dir / "services").glob("*-*.log"))
    assert [log.stem for log in logs] == ["coordinator-0", "generation-0", "learner-0", "reward-0"]
    lines = [line for log in logs for line in log.read_text().splitlines()]
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    warnings = [line for line in entries if line["level"] not in ("debug", "info")]
    # A random policy seldom ends its answers, which the verdict on learning says.
    assert [line for line in warnings if "answers are cut off" not in line.get("text", "")] == []
    assert [line for line in lines if ") WARNING " in line] == [], "vLLM's"
    assert "ReadTimeout" not in run.printed


def test_every_group_issued_is_settled_once(run: WholeRun) -> None:
    trained = [group for step in range(1, STEPS + 1) for group in sorted({row["group"] for row in run.rows(step)})]
    otherwise = [line["group"] for line in run.lines("settled.jsonl")]
    assert max(Counter(trained + otherwise).values()) == 1
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["groups"]["trained"] == len(trained) == STEPS * GROUPS
    ended = ("trained", "filtered", "stale", "failed", "unused")
    assert sum(summary["groups"][name] for name in ended) == summary["groups"]["issued"]


def test_every_generated_token_is_in_a_column_of_the_ledger(run: WholeRun) -> None:
    records = [LedgerRecord.model_validate(line) for line in run.lines(LEDGER)]
    assert [record.step for record in records] == [*range(1, STEPS + 1), STEPS]
    assert {record.difference for record in records} == {0}
    last = records[-1].tokens
    logged = sum(sum(row["mask"]) for step in range(1, STEPS + 1) for row in run.rows(step) if not row["skipped"])
    assert last["trained"] == logged > 0
    # The others are of groups that the coordinator issued before it heard of the end.
    at_the_end = ("unused", "unfinished", "superseded", "in_flight")
    assert last["generated"] == logged + sum(last.get(column, 0) for column in at_the_end)
    assert last["evaluation"] > 0


def test_without_lag_every_token_is_of_its_steps_version(run: WholeRun) -> None:
    for step in range(1, STEPS + 1):
        rows = run.rows(step)
        assert len(rows) == GROUPS * SIZE
        assert {version for row in rows for version in row["version"]} == {step - 1}
        assert all(row["mask"] == [True] * len(row["token_ids"]) for row in rows)


def test_a_plain_loop_fed_with_the_log_has_the_same_losses_and_weights(run: WholeRun) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = [_plain_step(model, optimizer, run.rows(step)) for step in range(1, STEPS + 1)]
    logged = [line["figures"]["loss"] for line in run.lines("metrics.jsonl")]
    assert any(abs(loss) > 1e-4 for loss in losses), "no step had a signal: the comparison would show nothing"
    assert losses == pytest.approx(logged, rel=1e-4, abs=1e-6)
    exported = AutoModelForCausalLM.from_pretrained(run.run_dir / "export", dtype=torch.float32)
    for (name, ours), theirs in zip(exported.named_parameters(), model.parameters(), strict=True):
        # By norm: where a gradient is nearly zero, AdamW's first steps turn its rounding into a step of full size.
        assert (ours - theirs).norm() < 1e-3 * theirs.norm(), name


def _plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[dict[str, Any]]) -> float:
    """GSPO as the paper writes it, one sequence at a time, without outliers; the mean loss of the mini-batches."""
    advantages = _advantages(rows)
    losses = []
    for mini_batch in sorted({row["mini_batch"] for row in rows}):
        chosen = [i for i, row in enumerate(rows) if row["mini_batch"] == mini_batch]
        parts = [_sequence_loss(model, rows[i], advantages[i]) for i in chosen]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def _advantages(rows: list[dict[str, Any]]) -> list[float]:
    advantages = []
    for row in rows:
        rewards = torch.tensor([other["reward"] for other in rows if other["group"] == row["group"]])
        spread = rewards.max() > rewards.min()
        advantages.append(float((row["reward"] - rewards.mean()) / (rewards.std() + 1e-6)) if spread else 0.0)
    return advantages


def _sequence_loss(model: torch.nn.Module, row: dict[str, Any], advantage: float) -> Tensor:
    prompt, answer = row["prompt_token_ids"], torch.tensor(row["token_ids"])
    logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits, dim=-1).gather(1, answer[:, None])[:, 0]
    log_ratio = logp - torch.tensor(row["logp"])
    ratio = log_ratio.mean().exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    if not BEHAVIOR_LOW <= log_ratio.detach().sum().exp() <= BEHAVIOR_HIGH:
        advantage = 0.0
    return -torch.minimum(ratio * advantage, clipped * advantage)


def test_the_engine_and_the_learner_agree_on_log_probs(run: WholeRun) -> None:
    for line in run.lines("metrics.jsonl"):
        assert line["figures"]["sigma_token"] < 1e-5
        assert line["figures"]["age_max"] == 0


def test_the_run_leaves_what_it_promises(run: WholeRun) -> None:
    names = {path.name for path in run.run_dir.iterdir()}
    assert names >= {"config.yaml", "environment.json", "log", "checkpoints", "export", "report.html"}
    assert [path.name for path in (run.run_dir / "checkpoints").iterdir()] == [f"step-{STEPS:06d}"]
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["policy_version"]) == (STEPS, STEPS)
    before, *_, after = run.lines("evaluations.jsonl")
    assert (before["version"], after["version"]) == (0, STEPS)
    assert summary["accuracy_before"] == before["figures"]["sampled_mean"]
    assert summary["accuracy_after"] == after["figures"]["sampled_mean"]
    versions = run.lines("policy.jsonl")
    assert [line["version"] for line in versions] == list(range(STEPS + 1))
    assert len({line["digest"] for line in versions}) == STEPS + 1


def test_every_version_was_measured_by_itself_and_the_best_is_kept(run: WholeRun) -> None:
    measured = run.lines("evaluations.jsonl")
    assert [line["version"] for line in measured] == list(range(STEPS + 1))
    assert not [line for line in measured if "newest_version" in line["figures"]]
    best = max(measured, key=lambda line: line["figures"]["sampled_mean"])
    facts = json.loads((run.run_dir / "best" / "best.json").read_text())
    assert (facts["version"], facts["score"]) == (best["version"], best["figures"]["sampled_mean"])
    weights: dict[str, Any] = load_file(run.run_dir / "best" / "model.safetensors")
    digest = policy_digest((name, "float32", tuple(t.shape), t) for name, t in weights.items())
    assert digest == run.lines("policy.jsonl")[best["version"]]["digest"]
    assert not list((run.run_dir / "candidates").iterdir())


def test_tensorboard_shows_the_run(run: WholeRun) -> None:
    shown = EventAccumulator(str(run.run_dir / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/reward_mean")] == list(range(1, STEPS + 1))
    logged = [line["figures"]["sampled_mean"] for line in run.lines("evaluations.jsonl")]
    assert [event.value for event in shown.Scalars("eval/sampled_mean")] == pytest.approx(logged)


def test_nothing_is_left_running(run: WholeRun) -> None:
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(run.run_dir) in command]
