"""The report of a run: what summary.json counts, what its file shows, and of which runs it can be written.

The run directories are written by the learner's own RunDir, so that reader and writer agree.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gspo.common.config.engines import LoraConfig
from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME, read_config, write_config
from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row, row_from_scored
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding
from gspo.learner.storage.run_directory import RunDir
from gspo.runlog.run_history import RunHistory
from gspo.view.picture.curves import Panel, StepFigure, level, running_mean
from gspo.view.picture.page import report_file, write_report
from gspo.view.picture.plots import PLOTS, curves_of
from gspo.view.picture.summary import summarise
from gspo.view.picture.tables import read_samples
from gspo_proto.rollout_pb2 import EvaluationDone
from tests.support.monitoring.drawn_curves import drawn_curves
from tests.support.monitoring.recorded_shortage import SENTENCE, record_shortage
from tests.unit.learner.conftest import _scored

NUM_STEPS, GROUPS_A_STEP, ROLLOUTS_A_GROUP = 20, 4, 2
SCRIPT = "<script>alert('x')</script> & \x00 {{ 7 * 7 }}"


def row(step: int, group: int, number: int, **changes: Any) -> Row:
    """A rollout of three tokens that was trained on; the second of a group has reward 1."""
    scored = _scored(group, number, version=(max(0, step - 2), step - 1, step - 1), reward=float(number))
    of_log = {"step": step, "prompt": f"What is {group} + 1?", "text": f"It is {group + number}.", "parts_json": "[]"}
    return replace(row_from_scored(scored), **{**of_log, "advantage": number - 0.5, "mini_batch": 0, **changes})


def step_rows(step: int) -> list[Row]:
    """The rollouts of a step, of groups of its own."""
    groups = range((step - 1) * GROUPS_A_STEP, step * GROUPS_A_STEP)
    return [row(step, group, number) for group in groups for number in range(ROLLOUTS_A_GROUP)]


def step_figures(step: int, **changes: float) -> dict[str, float]:
    """Figures as the learner gives them; `log` says nothing about the noise, as on steps without fresh tokens."""
    wobble = math.sin(step)
    figures = {
        "reward_mean": 0.25 + 0.025 * step + 0.05 * wobble,
        "reward_std": 0.4,
        "zero_spread_groups": 0.2 + 0.01 * step,
        "clipped_sequences": 0.3 + 0.1 * wobble,
        "clipped_sequences_low": 0.2 + 0.1 * wobble,
        "clipped_sequences_high": 0.1,
        "outside_clip_sequences": 0.45,
        "outside_clip_at_start": 0.3,
        **({"outside_clip_at_end": 0.5, "outside_clip_movement": 0.2} if step % 10 == 0 else {}),
        "log_ratio_mean": 1e-4 * wobble,
        "log_ratio_std": 3e-4,
        "log_ratio_max": 2e-3,
        "k3": 1e-3,
        "entropy": 0.8 - 0.01 * step,
        "teacher_kl": 0.5 - 0.02 * step,
        "grad_norm": 1 + 0.3 * wobble,
        "loss": 0.01 * wobble,
        "tokens": 24.0,
        "sequences": 8.0,
        "age_mean": 0.5,
        "age_max": 1.0,
        "response_tokens_mean": 3.0,
        "truncated_share": 0.0,
        "wait_s": 1.0,
        "log_s": 0.25,
        "train_s": 2.5,
        "publish_s": 0.25,
        "step_s": 4.0,
        "tokens_per_s": 6.0,
        "gpus": 2.0,
        "tokens_per_s_per_gpu": 3.0,
        "learner_mfu": 0.25,
        "mfu": 0.125,
    }
    if step % 2:
        figures |= {"noise_share": 0.05, "noise_clip": 0.0011, "outside_clip_noise": 0.05, "outside_clip_lag": 0.25}
    return {**figures, **changes}


def train(run_dir: RunDir, first: int, last: int, **figures: float) -> None:
    """Steps from `first` to `last`, whole."""
    for step in range(first, last + 1):
        run_dir.write_step(step, step_rows(step))
        run_dir.append_version(step, f"digest-{step}", "float32")
        run_dir.append_metrics(step, step_figures(step, **figures))


def evaluate(run_dir: RunDir, version: int, sampled: float, file: str = "", **changes: float) -> None:
    """An evaluation of 50 prompts, with the sampled mean as its score."""
    figures = {"sampled_mean": sampled, "sampled_stderr": 0.03, "greedy_mean": sampled + 0.1, "greedy_stderr": 0.04}
    figures |= {"pass_at_1": sampled, "pass_at_4": sampled + 0.125, "num_prompts": 50.0, **changes}
    label = f"v{version}{file}"
    run_dir.append_evaluation(
        EvaluationDone(evaluation=label, version=version, step=version, figures=figures, file=file, score=sampled)
    )


@pytest.fixture
def path(config: Config, tmp_path: Path) -> Path:
    """A run directory as the command line leaves it before anything starts."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_config(config, run_dir / CONFIG_NAME)
    (run_dir / ENVIRONMENT_NAME).write_text(json.dumps({"python": "3.11.7", "gspo": "0.1.0"}))
    return run_dir


@pytest.fixture
def ended(path: Path) -> Path:
    """A run of 20 steps: 80 groups trained, and 2 filtered, 3 stale, 1 failed, 4 unused of 90."""
    with RunDir(path) as run_dir:
        run_dir.append_version(0, "digest-0", "float32")
        evaluate(run_dir, 0, 0.35)
        train(run_dir, 1, 10)
        evaluate(run_dir, 10, 0.6)
        train(run_dir, 11, NUM_STEPS)
        evaluate(run_dir, NUM_STEPS, 0.85)
        run_dir.settle(
            [EndedGroup(group, GroupEnding.FILTERED, "all rewards equal") for group in (80, 81)]
            + [EndedGroup(group, GroupEnding.STALE, "too old") for group in (82, 83, 84)]
            + [EndedGroup(85, GroupEnding.FAILED, "reward raised <b>KeyError</b>")]
            + [EndedGroup(group, GroupEnding.UNUSED, "run.total_steps reached") for group in range(86, 90)]
        )
    return path


def test_the_report_says_which_lengths_were_lost_to_age(path: Path) -> None:
    """The trained answers have 3 tokens; of those dropped one as well, and two have 4 to 7."""
    with RunDir(path) as run_dir:
        train(run_dir, 1, 1)
        run_dir.settle([EndedGroup(4, GroupEnding.STALE, "too old", (3, 7, 4))])
    _, html = report(path)
    text = " ".join(html.split())
    assert '<th scope="row">2 to 3</th><td>8</td><td>1</td><td>11 %</td>' in text
    assert '<th scope="row">4 to 7</th><td>0</td><td>2</td><td>100 %</td>' in text


def test_a_report_without_losses_to_age_has_no_table_of_them(ended: Path) -> None:
    assert "Answers dropped as too old" not in report(ended)[1]


def page(run_dir: Path) -> str:
    """The report on the disk."""
    return (run_dir / "report.html").read_text()


def report(run_dir: Path) -> tuple[dict[str, Any], str]:
    """Summary and page of a run without an end."""
    log = RunHistory(run_dir)
    summary = summarise(log)
    return summary, report_file(log, summary).decode()


def own_parts(text: str) -> list[str]:
    """The contents of the styles and the scripts that a page has within it."""
    return re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", text, re.DOTALL)


def test_the_summary_of_a_run_that_ended(ended: Path) -> None:
    wall_s = {"start": 20.0, "training": 80.0}
    summary = write_report(ended, wall_s=wall_s, finished={"end": "completed", "reason": "run.total_steps reached"})
    assert json.loads((ended / "summary.json").read_text()) == summary
    assert (summary["run"], summary["gspo_version"]) == ("small", "0.1.0")
    assert (summary["end"], summary["end_reason"], summary["failed"]) == ("completed", "run.total_steps reached", False)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.35, 0.85)
    assert (summary["greedy_before"], summary["greedy_after"]) == pytest.approx((0.45, 0.95))
    assert (summary["steps"], summary["policy_version"], summary["digest"]) == (20, 20, "digest-20")
    assert summary["groups"] == {
        "issued": 90,
        "trained": 80,
        "filtered": 2,
        "stale": 3,
        "failed": 1,
        "unused": 4,
        "open": 0,
    }
    assert summary["rollouts"] == {"trained": 160, "skipped_failed": 0, "skipped_truncated": 0, "skipped_stale": 0}
    assert (summary["tokens"], summary["tokens_per_s"]) == (480, 6.0)
    assert summary["card_use"] == pytest.approx({"tokens_per_s_per_gpu": 3.0, "learner_mfu": 0.25, "mfu": 0.125})
    assert summary["wall_s"] == wall_s
    assert summary["steps_s"] == {
        "wait_s": 20.0,
        "shift_s": 0.0,
        "train_s": 50.0,
        "probe_s": 0.0,
        "clip_split_s": 0.0,
        "publish_s": 5.0,
        "hold_s": 0.0,
        "log_s": 5.0,
    }
    assert summary["reward_first"] == step_figures(1)["reward_mean"]
    assert summary["reward_last"] == step_figures(20)["reward_mean"]


def test_the_page_shows_the_headline_and_stands_alone(ended: Path) -> None:
    write_report(
        ended, wall_s={"start": 20.0, "training": 80.0}, finished={"end": "completed", "reason": "stopped by the moon"}
    )
    text = page(ended)
    assert "finished: stopped by the moon" in text
    # sqrt(0.03^2 + 0.03^2) = 0.0424
    assert "policy version 0 to 20: +0.500 ± 0.042" in text
    assert "the five endings add up to it" in text
    assert "Notes on these numbers" not in text
    others = {"turns", "tools", "ends", "sources", "experts"}  # of conversations, several sources, a mixture
    assert {name.partition("-")[0] for name in drawn_curves(text)} == {plot.name for plot in PLOTS} - others
    assert "reward raised &lt;b&gt;KeyError&lt;/b&gt; (1)" in text
    assert "all weights" in text
    assert " ".join(["<th", 'scope="row">trained</th><td>80</td><td>89', "%</td>"]) in text
    assert "Copyright (c) 2022 Leon Sorokin" in text


def test_the_page_loads_nothing_and_runs_its_own_scripts_alone(ended: Path) -> None:
    _, text = report(ended)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    parts = own_parts(text)
    digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
    assert len(digests) == 4
    assert all(f"&#39;sha256-{digest}&#39;" in policy for digest in digests)
    assert policy.startswith("default-src &#39;none&#39;;") and policy.count("sha256-") == 4
    assert "unsafe" not in policy
    for part in parts:
        text = text.replace(part, "")
    assert not re.search(r" (src|href)=", text)


def test_the_page_says_why_sequences_are_outside_the_clip(ended: Path) -> None:
    causes = write_report(ended)["outside_clip"]
    assert (causes["noise"], causes["lag"], causes["movement"]) == pytest.approx((0.05, 0.25, 0.2))
    assert causes["noise_clip"] == 0.0011
    assert (
        "before a step&#39;s first update 30.0% ± 0.0% of sequences, 5.0% ± 0.0% by the engines&#39; noise (measured "
        "in 10 of 20 steps) and 25.0% ± 0.0% by lag; after its last update 50.0% ± 0.0% of the same sequences, 20.0% ± "
        "0.0% by the policy&#39;s movement (mean of 2 of 20 steps ± standard error)" in page(ended)
    )


def test_a_clip_that_follows_from_the_length_is_drawn_and_named(ended: Path) -> None:
    config = read_config(ended / CONFIG_NAME)
    algorithm = config.algorithm.model_copy(update={"pg_clip_reference_length": 240})
    write_config(config.model_copy(update={"algorithm": algorithm}), ended / CONFIG_NAME)
    history = RunHistory(ended)

    def bounds() -> list[float | None]:
        (curve,) = (curve for curve in curves_of(history) if curve.name == "log_ratio")
        return [line.values[1] for line in curve.lines if line.style == "dashed"]

    assert bounds() == []  # one bound for every step would be wrong
    for figures in history.figures:
        figures |= {"clip_low_mean": 0.006, "clip_high_mean": 0.008}
    assert bounds() == pytest.approx([math.log(0.994), math.log(1.008)])
    write_report(ended)
    assert "0.0004 above 1, for 240 tokens" in page(ended)


def test_the_page_says_what_lora_trained_and_over_how_many_ranks(ended: Path) -> None:
    config = read_config(ended / CONFIG_NAME)
    learner = config.learner.model_copy(update={"ranks": 2, "zero_stage": 2, "lora": LoraConfig(rank=8)})
    write_config(config.model_copy(update={"learner": learner}), ended / CONFIG_NAME)
    write_report(ended)
    assert "float32, 2 ranks, ZeRO 2" in page(ended)
    assert "adapters (LoRA) of rank 8, alpha 32, at all-linear" in page(ended)


def test_several_files_and_the_best_version_are_distinguished(path: Path) -> None:
    with RunDir(path) as run_dir:
        for version, easy, hard in ((0, 0.5, 0.125), (10, 0.875, 0.25), (20, 0.75, 0.375)):
            evaluate(run_dir, version, easy, "easy")
            evaluate(run_dir, version, hard, "hard<b>", newest_version=version + 1.0)
        train(run_dir, 1, 2)
    # The headline is of the file that the run's configuration names first.
    config = yaml.safe_load((path / CONFIG_NAME).read_text())
    config["evaluation"] = {"prompts": {"easy": "e.jsonl", "hard": "h.jsonl"}, "keep_best": "sampled_mean"}
    (path / CONFIG_NAME).write_text(yaml.safe_dump(config))
    summary, text = report(path)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.5, 0.75)
    assert (summary["pass_at_k_before"], summary["pass_at_k_after"]) == (0.625, 0.875)
    assert (summary["best"]["version"], summary["best"]["score"]) == (10, 0.875)
    assert "10 (sampled_mean 0.875 ± 0.030, of easy)" in text
    assert "held-out reward of easy, mean over sampled answers to prompts never trained on" in text
    assert "held-out reward of hard&lt;b&gt;, mean over sampled answers" in text
    assert summary["held_out"]["hard<b>"]["before"]["sampled_mean"] == 0.125
    assert summary["held_out"]["easy"]["after"]["version"] == 20
    tables = text.split("Held-out evaluations")[1]
    assert tables.index("<h3>easy</h3>") < tables.index("<h3>hard&lt;b&gt;</h3>")
    assert '<th scope="row">10 (best)</th>' in tables and "20 (best)" not in tables
    assert '<th scope="col">pass@4</th>' in tables and "0.875 ± 0.030" in tables
    lines = {line["label"]: line["values"] for line in drawn_curves(text)["reward"]["lines"]}
    assert lines["hard<b>, sampled (± standard error)"] == [0.125, None, None, 0.25, 0.375]
    assert lines["best version, 10"] == [None, None, None, 0.875, None]
    assert "While version 0, 10, 20 was measured newer weights came in" in text


def test_text_of_a_rollout_is_shown_and_never_run(path: Path) -> None:
    with RunDir(path) as run_dir:
        run_dir.write_step(1, [row(1, 0, 0, text=SCRIPT, prompt=SCRIPT), row(1, 0, 1, outcome="<i>")])
    _, text = report(path)
    assert "<script>alert" not in text
    assert "<i>" not in text.split("Rollouts to read")[1]
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; ⟦U+0000⟧ {{ 7 * 7 }}") == 2


def test_conversations_have_plots_and_are_read_turn_by_turn(path: Path) -> None:
    turns = '[{"role": "assistant", "content": "16"}, {"role": "user", "content": "higher"}]'
    talked = {
        "turns_done_mean": 2.0,
        "turns_mean": 4.0,
        "tool_calls_mean": 1.0,
        "malformed_calls_mean": 0.0,
        "ended_turn_limit": 1.0,
    }
    with RunDir(path) as run_dir:
        train(run_dir, 1, 3, **talked)
        run_dir.write_step(4, [row(4, 90, 0, turns_json=turns, branch_starts=np.array([1], np.int32)), row(4, 90, 1)])
        evaluate(run_dir, 3, 0.5, turns_mean=3.5)
    write_report(path)
    text = page(path)
    assert {"turns", "tools", "ends"} <= drawn_curves(text).keys()
    assert [line["label"] for line in drawn_curves(text)["turns"]["lines"]][-1] == "held-out prompts, sampled"
    assert "assistant: 16\nuser: higher" in text
    assert text.count(" tokens in 2 branches, ") == 1
    assert '<th scope="col">turns</th>' in text


def test_several_sources_have_a_plot_of_their_own(path: Path) -> None:
    with RunDir(path) as run_dir:
        train(run_dir, 1, 3, **{"source_a/reward_mean": 0.5, "source_b/zero_spread_groups": 0.25})
    curves = drawn_curves(report(path)[1])
    assert [line["label"] for line in curves["sources"]["lines"]] == ["a"]
    assert [line["label"] for line in curves["sources-1"]["lines"]] == ["b"]


def test_open_groups_are_counted_up_to_the_highest_known(path: Path) -> None:
    with RunDir(path) as run_dir:
        train(run_dir, 1, 2)
        run_dir.settle([EndedGroup(11, GroupEnding.STALE, "too old")])
    summary, text = report(path)
    assert summary["groups"] == {
        "issued": 12,
        "trained": 8,
        "filtered": 0,
        "stale": 1,
        "failed": 0,
        "unused": 0,
        "open": 3,
    }
    assert "the five endings and the open groups add up to it" in text
    assert "3 groups were issued and have not ended" in text


def test_a_group_that_ended_twice_is_said(ended: Path) -> None:
    with (ended / "log" / "settled.jsonl").open("a") as file:
        file.write(json.dumps({"group": 3, "settlement": "failed", "reason": "again"}) + "\n")
    summary, text = report(ended)
    assert (summary["groups"]["trained"], summary["groups"]["failed"], summary["groups"]["issued"]) == (80, 2, 90)
    assert "the counts do not add up to this" in text
    assert "1 groups ended more than once (3)" in text


def test_groups_and_rollouts_of_removed_step_files_still_count(ended: Path) -> None:
    before, _ = report(ended)
    kept = (ended / "log" / "step-000003.parquet").read_bytes()
    with RunDir(ended) as run_dir:
        run_dir.checkpoints.begin(20)
        run_dir.checkpoints.finish(20)
        run_dir.prune(keep_checkpoints=1, keep_log_steps=17)
    assert [step for step in range(1, 21) if step not in RunHistory(ended).step_files] == [1, 2, 3]
    # A kill between the lines of a step's groups and the removal of its file leaves both.
    (ended / "log" / "step-000003.parquet").write_bytes(kept)
    after, _ = report(ended)
    assert (after["groups"], after["rollouts"]) == (before["groups"], before["rollouts"])


def test_skipped_rollouts_count_by_reason(path: Path) -> None:
    failed = {"reward": None, "advantage": None, "failure": "reward raised ValueError", "skipped": "failed"}
    with RunDir(path) as run_dir:
        rows = [row(1, 0, 0), row(1, 0, 1, **failed), row(1, 1, 0, skipped="truncated"), row(1, 1, 1, skipped="stale")]
        run_dir.write_step(1, rows)
    summary, text = report(path)
    assert summary["rollouts"] == {"trained": 1, "skipped_failed": 1, "skipped_truncated": 1, "skipped_stale": 1}
    assert "reward raised ValueError" in text


def test_the_page_says_why_answers_have_no_score(path: Path) -> None:
    why = {"reward": None, "failure": "r: raised ValueError: cannot judge '7' (r.py line 5)", "skipped": "failed"}
    with RunDir(path) as run_dir:
        run_dir.write_step(1, [row(1, 0, 0), row(1, 0, 1, **why)])
        run_dir.append_version(1, "digest-1", "float32")
        run_dir.append_metrics(1, step_figures(1, skipped_failed=1.0))
    write_report(path)
    page = (path / "report.html").read_text()
    assert (
        "1 answers without a score, left out of training, in 1 of 1 steps, the last of them step 1. r: raised" in page
    )


def test_the_page_says_which_step_ran_out_of_memory(path: Path) -> None:
    record_shortage(path)
    assert f"Memory: {SENTENCE}." in report(path)[1]


def test_a_panel_draws_what_it_declares_and_no_layer_of_zeros(ended: Path) -> None:
    history = RunHistory(ended)
    panel = Panel(
        "seconds",
        StepFigure("reward_std", "a line", "black", "dotted"),
        StepFigure("wait_s", "waiting", "black", "stacked"),
        StepFigure("hold_s", "nothing", "black", "stacked"),
        StepFigure("train_s", "training", "red", "stacked"),
        beside=lambda history: [level(history, 10, "a limit")],
    )
    lines = panel.drawn(history)
    assert [(line.label, line.values[20]) for line in lines] == [
        ("waiting", 1.0), ("training", 2.5), ("a line", 0.4), ("a limit", 10),
    ]  # fmt: skip
    nothing = Panel("", StepFigure("unknown", "unknown", "black"), beside=lambda history: [level(history, 10, "")])
    assert nothing.drawn(history) == []


def test_many_steps_are_drawn_with_their_running_mean(path: Path) -> None:
    with RunDir(path) as run_dir:
        for step in range(1, 101):
            run_dir.append_metrics(step, {"entropy": float(step % 2)})
    (entropy,) = curves_of(RunHistory(path))
    assert [(line.label, line.style) for line in entropy.lines] == [
        ("mean over tokens", "faint"), ("mean over tokens, mean of 5 steps", "solid"),
    ]  # fmt: skip
    assert [entropy.lines[1].values[step] for step in (50, 51)] == [0.4, 0.6]


def test_samples_are_the_best_and_worst_of_different_groups(path: Path) -> None:
    rewards = [0.9, 0.8, 0.7, 0.6, 0.1, 0.0, 0.2, 0.3]
    with RunDir(path) as run_dir:
        run_dir.write_step(1, [row(1, place // 2, place % 2, reward=r) for place, r in enumerate(rewards)])
    (samples,) = read_samples(RunHistory(path)).values()
    # Above the middle (0.45): groups 0, 0, 1, 1; below it: groups 2, 2, 3, 3. A second of a group comes after others.
    assert [(s["kind"], s["reward"]) for s in samples] == [
        ("among the highest", 0.9),
        ("among the highest", 0.7),
        ("among the highest", 0.8),
        ("among the lowest", 0.0),
        ("among the lowest", 0.2),
        ("among the lowest", 0.1),
    ]
    assert (samples[0]["versions"], samples[0]["num_tokens"]) == ("0", 3)


def test_versions_within_a_rollout_and_equal_rewards(path: Path) -> None:
    with RunDir(path) as run_dir:
        run_dir.write_step(9, [row(9, 0, number, reward=0.0) for number in range(2)])
    (samples,) = read_samples(RunHistory(path)).values()
    assert [(s["kind"], s["versions"]) for s in samples] == [("every reward is this", "7 to 8")] * 2


def test_long_texts_keep_both_ends(path: Path) -> None:
    with RunDir(path) as run_dir:
        run_dir.write_step(1, [row(1, 0, 0, text="a" * 2000 + "b" * 1234 + "c" * 2000)])
    (samples,) = read_samples(RunHistory(path)).values()
    assert samples[0]["text"] == "a" * 2000 + "\n[... 1,234 characters left out ...]\n" + "c" * 2000


def remove_everything(run_dir: Path) -> None:
    for name in (CONFIG_NAME, ENVIRONMENT_NAME):
        (run_dir / name).unlink()


def break_everything(run_dir: Path) -> None:
    (run_dir / "log").mkdir()
    (run_dir / CONFIG_NAME).write_text("name: [")
    (run_dir / ENVIRONMENT_NAME).write_text("{")
    (run_dir / "log" / "step-000001.parquet").write_bytes(b"PAR1")
    (run_dir / "log" / "step-000002.parquet.tmp").write_bytes(b"")
    for name in ("settled", "policy", "metrics", "evaluations"):
        (run_dir / "log" / f"{name}.jsonl").write_text('not json\n[1]\n{"step": 1}\n{"step": 2')
    (run_dir / "summary.json").write_text("[]")


def start_only(run_dir: Path) -> None:
    with RunDir(run_dir) as opened:
        opened.append_version(0, "digest-0", "float32")


@pytest.mark.parametrize("make", [lambda _: None, remove_everything, break_everything, start_only])
def test_a_run_without_a_step_has_a_report(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    summary = write_report(path, wall_s={}, finished={})
    assert (summary["steps"], summary["policy_version"], summary["groups"]["issued"]) == (0, 0, 0)
    assert [summary[name] for name in ("accuracy_before", "accuracy_after", "reward_first", "end_reason")] == [None] * 4
    assert "Nothing was trained and nothing measured." in page(path)
    assert "no end is recorded" in page(path)
    assert "there is nothing to draw" in page(path) and drawn_curves(page(path)) == {}


def test_what_could_not_be_read_is_said(path: Path) -> None:
    break_everything(path)
    _, text = report(path)
    for sentence in (
        "is not YAML",
        "environment.json cannot be read",
        "step-000001.parquet cannot be read",
        "metrics.jsonl: 3",
    ):
        assert sentence in text, sentence


def test_a_run_killed_after_a_step_was_logged(path: Path) -> None:
    with RunDir(path) as run_dir:
        evaluate(run_dir, 0, 0.35)
        train(run_dir, 1, 1)
        run_dir.write_step(2, step_rows(2))
    with (path / "log" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "vers')
    summary, text = report(path)
    assert (summary["steps"], summary["groups"]["trained"], summary["rollouts"]["trained"]) == (1, 8, 16)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.35, None)
    assert "Step 2 is logged and not trained yet" in text
    assert "There is one evaluation, of version 0: no before and after." in text


def test_a_single_held_out_file_is_named(ended: Path) -> None:
    config = yaml.safe_load((ended / CONFIG_NAME).read_text())
    config["evaluation"] = {"prompts": "sums/eval.jsonl"}
    (ended / CONFIG_NAME).write_text(yaml.safe_dump(config))
    summary, text = report(ended)
    assert [*summary["held_out"], summary["accuracy_file"]] == ["eval.jsonl"] * 2
    assert "held-out reward of eval.jsonl, mean over sampled answers to prompts never trained on" in text


def test_an_older_last_evaluation_and_chance_are_said(path: Path) -> None:
    with RunDir(path) as run_dir:
        evaluate(run_dir, 0, 0.35)
        train(run_dir, 1, 3)
        evaluate(run_dir, 2, 0.40, num_prompts=20.0, num_failed=7.0)
    summary, text = report(path)
    assert summary["accuracy_after_version"] == 2
    assert "The last evaluation is of version 2; the newest policy is version 3 and was not measured." in text
    assert "The first evaluation asked 50 prompts and the last 20" in text
    assert "7 answers of the first and last evaluation have no score" in text
    assert "policy version 0 to 2: no difference beyond two standard errors" in text


def test_advice_is_shown_with_its_steps(path: Path) -> None:
    with RunDir(path) as run_dir:
        train(run_dir, 1, 12, clipped_sequences=0.5)
    _, text = report(path)
    # Said after 10 steps in a row: at steps 10, 11 and 12.
    assert "<b>clipped_too_much</b>: 50% of sequences are clipped" in text
    assert "First at step 10, last at step 12, 3 steps in all" in text


def test_an_earlier_end_stands_until_a_step_was_trained(ended: Path) -> None:
    write_report(ended, wall_s={"start": 20.0}, finished={"end": "stopped", "reason": "stopped: Ctrl-C"})
    again = write_report(ended)
    assert (again["end"], again["end_reason"], again["wall_s"]) == ("stopped", "stopped: Ctrl-C", {"start": 20.0})
    with RunDir(ended) as run_dir:
        run_dir.write_step(21, [row(21, 200, 0)])
        run_dir.append_version(21, "digest-21", "float32")
    again = write_report(ended)
    assert (again["end"], again["end_reason"], again["wall_s"]) == (None, None, None)
    assert "1 of 21 trained steps have no figures" in page(ended)


def test_curves_that_have_nothing_to_show_any_more_go(ended: Path) -> None:
    write_report(ended)
    assert drawn_curves(page(ended))
    (ended / "log" / "metrics.jsonl").unlink()
    (ended / "log" / "evaluations.jsonl").unlink()
    write_report(ended)
    assert drawn_curves(page(ended)) == {}


def test_the_report_of_a_thousand_steps_is_small(path: Path) -> None:
    with RunDir(path) as run_dir:
        for step in range(1, 1001):
            figures = {name: math.sin(step * len(name)) for name in (*step_figures(1), "turns_mean", "experts_changed")}
            run_dir.append_metrics(step, figures)
    _, text = report(path)
    assert len(drawn_curves(text)["entropy"]["steps"]) == 1000
    assert len(text.encode()) < 5_000_000


def test_figures_that_were_not_finite_leave_a_gap(path: Path) -> None:
    with RunDir(path) as run_dir:
        train(run_dir, 1, 80)
        run_dir.append_metrics(85, step_figures(85, reward_mean=math.nan, clipped_sequences_low=math.inf))
    log = RunHistory(path)
    assert log.series("reward_mean")[85] is None
    summary = write_report(path)
    assert summary["reward_last"] == step_figures(80)["reward_mean"]
    assert [line["values"][-1] for line in drawn_curves(page(path))["clip"]["lines"]][:1] == [None]


def test_a_running_mean_passes_over_gaps_and_is_shorter_at_the_ends() -> None:
    assert running_mean([1.0, None, 3.0, 5.0, 10.0], 3) == [1.0, 2.0, 4.0, 6.0, 7.5]


def test_a_model_is_loaded_from_where_it_is(ended: Path) -> None:
    _, text = report(ended)
    assert "No model was exported yet" in text
    (ended / "export").mkdir()
    (ended / "export" / "config.json").write_text("{}")
    _, text = report(ended)
    assert f'from_pretrained("{ended}/export")' in text
    assert f"gspo run --resume {ended}" in text
