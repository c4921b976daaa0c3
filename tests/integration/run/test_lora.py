"""LoRA on a mixture of experts with ROLL's block and a dense teacher, by two ranks that share lines, on two sources.

Tokens are sampled from few. One source has an environment, and groups of equal rewards are replaced by others.

Not here: the books of a run (test_run.py), a mixture whose weights are trained themselves (test_run_moe.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo.common.source_order import SourceOrder
from gspo.common.telemetry.source_figures import figures_of
from gspo.common.weights.manifest import policy_digest
from tests.support.gspo_run import WholeRun, whole_run
from tests.support.monitoring.drawn_curves import drawn_curves
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.timeout(600)
STEPS, GROUPS = 2, 8
TOP_K, TOP_P = 20, 0.9
ROLL = Path(__file__).parents[3] / "examples/arithmetic/roll.yaml"
WEIGHTS = {"plain": 3.0, "game": 1.0}
# One turn, whose letters are the reward: two answers of a group hardly have the same, so none of them is filtered.
GAME = """
def reset(task):
    return {}, ""

def step(state, action):
    return state, "", sum(map(ord, action)) / 1000, True
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    folder = tmp_path_factory.mktemp("run")
    (folder / "game.py").write_text(GAME)
    lines = [json.dumps({"question": [{"role": "user", "content": f"turn {n}"}]}) for n in range(5)]
    (folder / "game.jsonl").write_text("\n".join(lines))
    plain = {"name": "plain", "prompts": "prompts.jsonl", "weight": WEIGHTS["plain"]}
    environment = {"path": "game.py", "turn_tokens": 6}
    game = {"name": "game", "prompts": "game.jsonl", "functions": [], "prompt_column": "question"}
    return whole_run(
        folder,
        make_tiny_model(folder / "model", seed=3, scale=4.0, num_experts=4),
        teacher={
            "path": str(make_tiny_model(folder / "teacher", seed=4, scale=2.0, layers=1)),
            "coef": 1e-4,
            "kl_in": "loss",
        },
        # Of two answers about half of the time both have the same reward.
        algorithm={
            **yaml.safe_load(ROLL.read_text())["algorithm"],
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": 2,
            "prompt_length": 64,
            "response_length": 24,
            "filter_zero_spread": True,
        },
        data={"prompts": None, "sources": [plain, {**game, "environment": environment}]},
        evaluation={
            "prompts": {"plain": "eval.jsonl", "game": "game.jsonl"},
            "num_answers": 2,
            "greedy": False,
            "every": 0,
            "limit": 3,
            "keep_best": "sampled_mean",
        },
        sampling={"top_k": TOP_K, "top_p": TOP_P},
        learner={"learning_rate": 1e-2, "lora": {"rank": 4}, "ranks": 2, "sequence_ranks": 2},
        run={"total_steps": STEPS},
    )


def test_the_start_shows_the_planned_memory(run: WholeRun) -> None:
    """Also on a CPU, and with its activations."""
    table = run.printed[run.printed.index("process ") : run.printed.index("(planned GiB of host memory)")]
    assert [line.split()[0] for line in table.splitlines()] == ["process", "generation-0", "learner-0"]
    assert "?" not in table and " MiB" in table


def test_the_engine_serves_what_the_adapters_make_of_the_base(run: WholeRun) -> None:
    """The engine's log-probs are those of the ranks, over the same sets. Each rank has a part of a line."""
    versions = [{version for row in run.rows(step) for version in row["version"]} for step in (1, STEPS)]
    assert versions == [{0}, {STEPS - 1}], "the second step was not sampled from pushed weights"
    for line in run.lines("metrics.jsonl"):
        assert line["figures"]["sigma_token"] < 1e-5
    assert len({line["digest"] for line in run.lines("policy.jsonl")}) == STEPS + 1


def test_every_token_has_the_set_that_it_was_sampled_from(run: WholeRun) -> None:
    smaller = 0
    for step, line in enumerate(run.lines("metrics.jsonl"), 1):
        rows = run.rows(step)
        for row in rows:
            sizes, ids = row["kept_sizes"], iter(row["kept_ids"])
            sets = [{next(ids) for _ in range(size)} for size in sizes]
            assert [bool(size) for size in sizes] == row["mask"]  # a peaked policy has no ties
            assert all(token in kept for token, kept in zip(row["token_ids"], sets, strict=True) if kept)
            assert max(sizes) <= TOP_K
            smaller += sum(0 < size < TOP_K for size in sizes)
        counted = [size for row in rows for size in row["kept_sizes"] if size and row["skipped"] is None]
        assert line["figures"]["kept_tokens_mean"] == pytest.approx(sum(counted) / len(counted))
        assert line["figures"]["skipped_tokens_tied"] == 0
    assert smaller > 100, "top_p cut nothing"


def test_the_teacher_scores_the_sampled_tokens(run: WholeRun) -> None:
    """The KL from the log alone: old - teacher of each token, and by how much the policy has moved from old.

    Both are over the tokens that the policy sampled from.
    """
    teacher = AutoModelForCausalLM.from_pretrained(run.folder / "teacher", dtype=torch.float32)
    for step, line in enumerate(run.lines("metrics.jsonl"), 1):
        above = []
        for row in run.rows(step):
            ids = torch.tensor([[*row["prompt_token_ids"], *row["token_ids"]]])
            with torch.inference_mode():
                logits = teacher(input_ids=ids).logits[0, len(row["prompt_token_ids"]) - 1 : -1]
            logits = outside_sets_removed(logits, row)
            logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0]
            above.append((torch.tensor(row["logp"]) - logp)[torch.tensor(row["mask"])])
        moved = line["figures"]["token_log_ratio_mean"]
        assert line["figures"]["teacher_kl"] == pytest.approx(float(torch.cat(above).mean()) + moved, abs=1e-4)
    assert "teacher" in drawn_curves((run.run_dir / "report.html").read_text())


def outside_sets_removed(logits_TV: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """The logits, with minus infinity outside of the sets of the policy's tokens."""
    outside_TV = torch.ones_like(logits_TV, dtype=torch.bool)
    place_N = torch.arange(len(row["kept_sizes"])).repeat_interleave(torch.tensor(row["kept_sizes"]))
    outside_TV[place_N, torch.tensor(row["kept_ids"])] = False
    return logits_TV.masked_fill(outside_TV & torch.tensor(row["mask"])[:, None], -torch.inf)


def test_the_export_is_the_base_with_its_adapters(run: WholeRun) -> None:
    exported = load_file(run.run_dir / "export" / "model.safetensors")
    digest = policy_digest((name, "float32", tuple(t.shape), t.numpy()) for name, t in exported.items())
    assert run.lines("policy.jsonl")[-1]["digest"] == digest
    original = load_file(run.folder / "model" / "model.safetensors")
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, original[name])}
    assert exported.keys() == original.keys()
    assert {"self_attn.q_proj", "experts.0.down_proj", "mlp.gate"} <= {
        kind for name in changed for kind in ("self_attn.q_proj", "experts.0.down_proj", "mlp.gate") if kind in name
    }
    base = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run.run_dir / "export" / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(run.run_dir / "export", dtype=torch.float32).eval()
    token_RS = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.allclose(adapted(token_RS).logits, merged(token_RS).logits, atol=1e-4)


def test_groups_of_equal_rewards_are_settled_and_others_fill_the_batch(run: WholeRun) -> None:
    rewards: dict[int, set[float]] = {}
    for step in range(1, STEPS + 1):
        rows = run.rows(step)
        assert len({row["group"] for row in rows}) == GROUPS
        for row in rows:
            rewards.setdefault(row["group"], set()).add(row["reward"])
    assert all(len(values) == 2 for values in rewards.values())
    filtered = [line["group"] for line in run.lines("settled.jsonl") if line["settlement"] == "filtered"]
    assert filtered and not rewards.keys() & set(filtered)
    groups = json.loads((run.run_dir / "summary.json").read_text())["groups"]
    assert (groups["trained"], groups["filtered"]) == (STEPS * GROUPS, len(filtered))
    assert sum(line["figures"]["groups_filtered"] for line in run.lines("metrics.jsonl")) <= len(filtered)


def test_rolls_block_whitens_rewards_over_all_tokens_and_has_no_group_baseline(run: WholeRun) -> None:
    lines = run.lines("metrics.jsonl")
    for step, line in enumerate(lines, start=1):
        rows = run.rows(step)
        assert all(row["advantage"] == row["reward"] for row in rows)
        reward_T = torch.cat([torch.full((sum(row["mask"]),), row["reward"], dtype=torch.float64) for row in rows])
        whitened_T = (reward_T - reward_T.mean()) / (reward_T.var() + 1e-8).sqrt()
        trained_T = whitened_T.clamp(-2.0, 2.0)
        assert line["figures"]["advantage_mean"] == pytest.approx(float(trained_T.mean()), abs=1e-6)
        assert line["figures"]["advantage_max"] == pytest.approx(float(trained_T.abs().max()))
    # The reference is the base without adapters: the policy leaves it with the first mini-batch.
    assert all(line["figures"]["reference_kl"] > 0 for line in lines)


def test_each_source_has_its_share_its_reward_and_its_figures(run: WholeRun) -> None:
    order = SourceOrder([*WEIGHTS.values()])
    for step, line in enumerate(run.lines("metrics.jsonl"), start=1):
        for row in run.rows(step):
            assert row["source"] == [*WEIGHTS][order.place(row["group"]).source]
            (part,) = json.loads(row["parts_json"])
            assert part["name"] == {"plain": "reward", "game": "environment"}[row["source"]]
            assert bool(row["turns_json"]) == (row["source"] == "game")
        for source in {row["source"] for row in run.rows(step)}:
            own = [row for row in run.rows(step) if row["source"] == source]
            seen = figures_of(source, line["figures"])
            assert seen["groups"] == len({row["group"] for row in own})
            assert seen["reward_mean"] == pytest.approx(sum(row["reward"] for row in own) / len(own))
    assert {row["source"] for step in range(1, STEPS + 1) for row in run.rows(step)} == WEIGHTS.keys()
    assert "sources" in drawn_curves((run.run_dir / "report.html").read_text())


def test_each_source_is_measured_and_the_best_version_is_that_of_their_mean(run: WholeRun) -> None:
    means: dict[int, dict[str, float]] = {}
    for line in run.lines("evaluations.jsonl"):
        means.setdefault(line["version"], {})[line["file"]] = line["figures"]["sampled_mean"]
        assert ("turns_mean" in line["figures"]) == (line["file"] == "game")
    assert means.keys() == {0, STEPS}
    total = sum(WEIGHTS.values())
    scores = {v: sum(WEIGHTS[file] * mean[file] for file in WEIGHTS) / total for v, mean in means.items()}
    best = json.loads((run.run_dir / "best" / "best.json").read_text())
    assert best["score"] == pytest.approx(max(scores.values()))
    assert scores[best["version"]] == pytest.approx(best["score"])
