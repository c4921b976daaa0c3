"""Both conversation examples, cold start and all, cut short: their log, figures, panels and report.

One is as it is, the other a user's copy with more keys of the objective. Not here: what a turn is made of
(tests/unit/generation, tests/integration/generation), and learning, for which a policy of so few lessons is too poor.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.common.config.loading import read_config
from tests.conftest import free_port
from tests.support.gspo_run import EXAMPLES, WholeRun, example_copy, example_run
from tests.support.monitoring.drawn_curves import drawn_curves
from tests.support.monitoring.prometheus_names import panel_queries
from tests.support.monitoring.prometheus_server import Prometheus
from tests.support.monitoring.run_observer import followed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STEPS, ROLLOUTS = 2, 16 * 8
# Enough for tool calls that can be read and for guesses that are numbers.
LESSONS, OPTIONS = 60, ("--steps", str(STEPS))


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Only the policy's tokens have a version, and there are as many stretches of them as turns."""
    assert len(rows) == ROLLOUTS
    assert {row["failure"] for row in rows} == {None}
    for row in rows:
        assert [version == -1 for version in row["version"]] == [not counts for counts in row["mask"]]
        stretches = "".join("x" if counts else " " for counts in row["mask"]).split()
        assert len(stretches) == row["num_turns"] >= 1
        turns = json.loads(row["turns_json"])
        assert sum(turn["role"] == "assistant" for turn in turns) == row["num_turns"]


def check_figures(rows: list[dict[str, Any]], figures: dict[str, float]) -> None:
    """A step's figures are those of its rows."""
    for figure, column in (
        ("turns_mean", "num_turns"),
        ("tool_calls_mean", "num_tool_calls"),
        ("malformed_calls_mean", "num_malformed_calls"),
        ("cut_turns_mean", "num_cut_turns"),
    ):
        assert figures[figure] == pytest.approx(sum(row[column] for row in rows) / len(rows)), figure
    done = [row["num_turns"] for row in rows if row["outcome"] == "environment_done"]
    assert done, "the environment ended no conversation"
    assert figures["turns_done_mean"] == pytest.approx(sum(done) / len(done))
    shares = {outcome: number / len(rows) for outcome, number in Counter(row["outcome"] for row in rows).items()}
    ended = {name.removeprefix("ended_"): share for name, share in figures.items() if name.startswith("ended_")}
    assert ended == pytest.approx(shares)


def check_log_probs(run: WholeRun, rows: list[dict[str, Any]]) -> None:
    """The first step's are those of the cold start over the logged tokens: the engine computed on these very ones."""
    path = read_config(run.run_dir / "config.yaml").model.path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for row in [row for row in rows if set(row["version"]) <= {-1, 0}][:32]:
        prompt, tokens = row["prompt_token_ids"], torch.tensor(row["token_ids"])
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
        counts = torch.tensor(row["mask"])
        assert torch.allclose(torch.tensor(row["logp"])[counts], expected[counts], atol=1e-4)


def check_run(run: WholeRun) -> list[dict[str, Any]]:
    """The books of the run; all its rows."""
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == STEPS
    lines, rows = run.lines("metrics.jsonl"), [run.rows(step) for step in range(1, STEPS + 1)]
    for line, of_step in zip(lines, rows, strict=True):
        check_rows(of_step)
        check_figures(of_step, line["figures"])
    check_log_probs(run, rows[0])
    return [row for of_step in rows for row in of_step]


def plots_of(run: WholeRun) -> set[str]:
    """Names of the curves that the report shows."""
    return set(drawn_curves((run.run_dir / "report.html").read_text()))


def check_panels(prometheus: Prometheus, run: WholeRun, began_unix_s: float) -> None:
    """Each panel on conversations shows figures of the steps."""
    lines = run.lines("metrics.jsonl")
    for panel, query in panel_queries(of_conversations=True).items():
        series = prometheus.query_range(query, began_unix_s, time.time())
        shown = {curve["metric"]["figure"]: {float(value) for _, value in curve["values"]} for curve in series}
        assert shown, panel
        for figure, values in shown.items():
            assert values <= {line["figures"].get(figure) for line in lines}, panel


def check_advantages(rows: list[dict[str, Any]]) -> None:
    """Each reward less the mean of the others of its group."""
    for row in rows:
        others = [o["reward"] for o in rows if o["group"] == row["group"] and o["number"] != row["number"]]
        assert row["advantage"] == pytest.approx(row["reward"] - sum(others) / len(others), abs=1e-6)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path / "prometheus", free_port())
    yield server
    server.close()


def test_the_calculator_is_called_and_its_answers_are_in_the_conversations(
    tmp_path: Path, prometheus: Prometheus
) -> None:
    keys = {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum-turn-norm", "entropy_coef": 1e-3}
    began_unix_s = time.time()
    with ExitStack() as watching:
        example = example_copy("calculator", tmp_path, algorithm=keys)
        run = example_run(
            example,
            tmp_path,
            LESSONS,
            *OPTIONS,
            watch=lambda run_dir: watching.enter_context(followed(prometheus, run_dir)),
        )
    rows = check_run(run)
    check_advantages(rows)
    check_panels(prometheus, run, began_unix_s)
    called = [row for row in rows if row["num_tool_calls"]]
    assert called
    for row in called:
        replies = [turn for turn in json.loads(row["turns_json"]) if turn["role"] == "tool"]
        assert len(replies) == row["num_tool_calls"] + row["num_malformed_calls"]
    # A turn without a call is the last.
    assert {row["outcome"] for row in rows if row["num_turns"] == 1} <= {"environment_done", "truncated"}
    assert {row["outcome"] for row in called} >= {"environment_done"}
    assert plots_of(run) >= {"turns", "ends", "tools"}


def test_a_game_ends_with_the_right_guess_and_its_steps_are_the_reward(tmp_path: Path) -> None:
    run = example_run(EXAMPLES / "guess", tmp_path, LESSONS, *OPTIONS)
    rows = check_run(run)
    won = [row for row in rows if row["outcome"] == "environment_done"]
    assert won
    for row in rows:
        (part,) = json.loads(row["parts_json"])
        assert (part["name"], part["value"]) == ("environment", row["reward"])
    for row in won:
        last = json.loads(row["turns_json"])[-1]
        assert last == {"role": "user", "content": "right"}
        assert row["text"] == str(json.loads(row["columns_json"])["number"])
    shown = plots_of(run)
    assert shown >= {"turns", "ends"}
    assert "tools" not in shown
