"""The calculator's agent as a user starts it: by `gspo run` alone, or by `gspo agent` beside it. It has `openai` alone.

Not here: learning, for which a policy of so few lessons is too poor; branches and lost workers
(tests/integration/generation/test_agents.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.common.config.loading import read_config
from tests.support.gspo_run import WholeRun, example_copy, example_run
from tests.support.service_process import log_events

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STEPS, LESSONS, ROLLOUTS = 2, 20, 4 * 8
# A few rollouts: each starts a conversation of its own in a sandbox.
FEW: dict[str, dict[str, Any]] = {
    "algorithm": {"rollout_batch_size": 4},
    "agent": {"workers": 4},
    "evaluation": {"limit": 4},
}


def trained(folder: Path, *options: str) -> WholeRun:
    example = example_copy("calculator", folder, "agent.yaml", **FEW)
    return example_run(example, folder, LESSONS, "--steps", str(STEPS), *options, program="agent_demo.py")


def test_the_runs_own_agent_trains_the_policy_that_it_calls(tmp_path: Path) -> None:
    run = trained(tmp_path)
    _check_rows(run)
    log = log_events(run.run_dir / "services" / "agents-0.log")
    assert {line["event"] for line in log} >= {"sandbox", "run_finished", "service_ended"}
    assert not [line for line in log if line["level"] in ("warning", "error")]


def test_an_external_agent_trains_the_policy_that_it_calls(tmp_path: Path) -> None:
    _check_rows(trained(tmp_path, "--external"))
    assert "the run has ended" in next((tmp_path / "cache").rglob("agent.log")).read_text()


def _check_rows(run: WholeRun) -> None:
    """Rewards, turns and log-probs of the first step are those of its texts and of the model that it started from."""
    rows = run.rows(1)
    assert len(rows) == ROLLOUTS
    assert {row["failure"] for row in rows} == {None}
    config = read_config(run.run_dir / "config.yaml")
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    for row in rows:
        (part,) = json.loads(row["parts_json"])
        assert (part["name"], part["value"]) == ("agent", row["reward"])
        answer = str(json.loads(row["columns_json"])["answer"])
        assert row["reward"] == float(row["text"].strip() == answer)
        assert row["num_turns"] == 1 + sum(message["role"] == "tool" for message in json.loads(row["turns_json"]))
    # The first step is sampled by the model that it started from.
    for row in rows[:8]:
        tokens = [*row["prompt_token_ids"], *row["token_ids"]]
        assert "calculator" in tokenizer.decode(row["prompt_token_ids"])
        with torch.inference_mode():
            logits_TV = model(torch.tensor([tokens])).logits[0, len(row["prompt_token_ids"]) - 1 : -1]
        logp_TV = torch.log_softmax(logits_TV / row["temperature"], -1)
        logp_T = logp_TV.gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0].numpy()
        mask_T, version_T = np.array(row["mask"]), np.array(row["version"])
        assert (version_T[mask_T] == 0).all()
        assert np.abs(logp_T - np.array(row["logp"]))[mask_T].max() < 1e-3
