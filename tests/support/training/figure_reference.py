"""Every figure of a step from its log file, in float64 NumPy and a plain transformers loop: no line of gspo_core.

Not the learner: one forward a rollout, full logits, torch's AdamW, no micro-batches and no ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo.common.config.schema import Config
from tests.support.training.numpy_reference import (
    advantages,
    behavior_weight,
    bounded,
    kl,
    loss_and_gradient,
    ratios,
    sequences,
    token_weights,
)

Record = Mapping[str, Any]


def assert_figures_of_the_log(found: Mapping[str, float], log: Path, model: Path, config: Config) -> None:
    """Every figure that was found is computed from the log, and is the same; one without a computation fails."""
    expected = figures_of_the_log(log, model, config)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


def figures_of_the_log(log: Path, model: Path, config: Config) -> dict[str, float]:
    """What the step in the file `log`, trained from the model folder `model`, has to report."""
    records = pq.read_table(log, partitioning=None).to_pylist()
    step = records[0]["step"]
    kept = [record for record in records if record["skipped"] is None and any(record["mask"])]
    return {**_of_rows(records), **_of_ages(kept, step), **_Loop(model, config, kept, step).figures()}


def _of_rows(records: Sequence[Record]) -> dict[str, float]:
    sampled = {id(r): sum(version >= 0 for version in r["version"]) for r in records}
    masked = sum(sampled[id(r)] - sum(r["mask"]) for r in records if r["skipped"] is None)
    reasons = ("failed", "truncated", "stale")
    rewards = np.array([r["reward"] for r in records if r["reward"] is not None])
    groups = {r["group"] for r in records if r["reward"] is not None}
    equal = [len({r["reward"] for r in records if r["group"] == g and r["reward"] is not None}) == 1 for g in groups]
    return {
        **{f"skipped_{reason}": sum(r["skipped"] == reason for r in records) for reason in reasons},
        **{
            f"skipped_tokens_{reason}": sum(sampled[id(r)] for r in records if r["skipped"] == reason)
            + (masked if reason == "stale" else 0)
            for reason in reasons
        },
        "response_tokens_mean": np.mean([sum(r["mask"]) for r in records]),
        "truncated_share": np.mean([r["outcome"] == "truncated" for r in records]),
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(ddof=1),
        "reward_min": rewards.min(),
        "reward_max": rewards.max(),
        "zero_spread_groups": np.mean(equal),
        **_of_parts(records),
        **_of_answers(records),
        **_of_phrases(records),
        **_of_lengths([r for r in records if r["reward"] is not None]),
        "branches_mean": np.mean([1 + len(r["branch_starts"]) for r in records]),
        **_of_conversations(records),
    }


def _of_answers(records: Sequence[Record]) -> dict[str, float]:
    if any(r["turns_json"] for r in records):
        return {}
    texts = [r["text"] for r in records]
    return {
        "eos_share": np.mean([r["outcome"] == "eos" for r in records]),
        "same_text_share": max(texts.count(text) for text in texts) / len(texts),
    }


def _of_phrases(records: Sequence[Record]) -> dict[str, float]:
    """The share of answers with the most frequent run of eight tokens, of one answer to each of 64 prompts."""
    one_each = list({r["group"]: r for r in records}.values())[:64]
    holders: dict[tuple[int, ...], set[int]] = {}
    for number, record in enumerate(one_each):
        tokens = [token for token, is_sampled in zip(record["token_ids"], record["mask"], strict=True) if is_sampled]
        for first in range(len(tokens) - 7):
            holders.setdefault(tuple(tokens[first : first + 8]), set()).add(number)
    return {"same_phrase_share": max(map(len, holders.values())) / len(one_each)} if holders else {}


def _of_lengths(scored: Sequence[Record]) -> dict[str, float]:
    group = np.array([r["group"] for r in scored])
    values = np.array([[r["reward"], sum(r["mask"])] for r in scored], dtype=np.float64)
    for number in set(group):
        values[group == number] -= values[group == number].mean(axis=0)
    if not values.any(axis=0).all():
        return {}
    return {"reward_length_correlation": float(np.corrcoef(values.T)[0, 1])}


def _of_parts(records: Sequence[Record]) -> dict[str, float]:
    parts = [part for r in records if r["reward"] is not None for part in json.loads(r["parts_json"])]
    names = {part["name"] for part in parts}
    return {f"part_{name}_mean": np.mean([p["value"] for p in parts if p["name"] == name]) for name in names}


def _of_conversations(records: Sequence[Record]) -> dict[str, float]:
    talked = [r for r in records if r["turns_json"]]
    if not talked:
        return {}
    names = {
        "turns": "num_turns",
        "tool_calls": "num_tool_calls",
        "malformed_calls": "num_malformed_calls",
        "cut_turns": "num_cut_turns",
    }
    outcomes = [r["outcome"] for r in records]
    return {
        **{f"{name}_mean": np.mean([r[column] for r in talked]) for name, column in names.items()},
        "turn_tokens_mean": sum(sum(r["mask"]) for r in talked) / sum(r["num_turns"] for r in talked),
        "turns_done_mean": np.mean([r["num_turns"] for r in talked if r["outcome"] == "environment_done"]),
        **{f"ended_{outcome}": outcomes.count(outcome) / len(records) for outcome in set(outcomes)},
    }


def _of_ages(kept: Sequence[Record], step: int) -> dict[str, float]:
    ages = [step - 1 - v for r in kept for v, counted in zip(r["version"], r["mask"], strict=True) if counted]
    return {
        "age_mean": np.mean(ages),
        "age_max": max(ages),
        "tokens": len(ages),
        "sequences": len(kept),
        "groups": len({r["group"] for r in kept}),
    }


class _Loop:
    """The step's optimizer steps, one after another; [B, T] runs over the rollouts that count."""

    def __init__(self, model: Path, config: Config, kept: Sequence[Record], step: int) -> None:
        self.algorithm, self.learner, self.kept = config.algorithm, config.learner, kept
        self.teacher, self.splits = config.teacher, config.splits_clip(step)
        self.temperature, self.step = config.sampling.temperature, step
        self.rate = self.learner.learning_rate * min(1, step / (self.learner.warmup_steps + 1))
        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
            for _ in range(2)
        )
        self.mask = self._matrix("mask").astype(bool)
        self.behavior, self.version = self._matrix("logp"), self._matrix("version")
        self.fresh = self.mask & (self.version == step - 1)
        self.branch = None
        if self.algorithm.ratio_of == "branch":
            numbers = [[k for k, (_, start, end) in enumerate(_branches(r)) for _ in range(start, end)] for r in kept]
            self.branch = self._side_by_side(numbers)
        self.mini_batch = np.array([record["mini_batch"] for record in kept])
        self.old, self.ref = self.behavior, self._numbers(self.reference)
        self.correction: dict[str, float] = {}
        if self.algorithm.old_logprobs == "recompute":
            self.old = self._numbers(self.policy)
        self.counted, weight = self._corrected()
        given = np.array([record["advantage"] for record in kept])
        a, penalty = self.algorithm, np.zeros(self.mask.shape)
        if self.teacher.used:
            path = config.teacher.path
            self.taught = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            self.teacher_logp = self._numbers(self.taught)
            if self.teacher.kl_in == "advantage":
                penalty = self.teacher.coef * kl(self.old, self.teacher_logp, "k1")
        self.advantage = weight * advantages(
            given, self.counted, penalty, a.gamma, a.whiten_advantages, a.advantage_clip
        )

    def figures(self) -> dict[str, float]:
        """Train, and say what was seen on the way."""
        matrices, others = ([w for w in self.policy.parameters() if (w.ndim > 1) is matrix] for matrix in (True, False))
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.rate, weight_decay=self.learner.weight_decay)
        before, losses, norms, seen = self._look(), [], [], []
        for number in sorted(set(self.mini_batch)):
            part = self.mini_batch == number
            rows = [self._logp_entropy(self.policy, self.kept[i]) for i in np.flatnonzero(part)]
            logp, entropy = (self._side_by_side([row[k].detach().numpy() for row in rows]) for k in (0, 1))
            loss, gradient = self._loss_and_gradient(part, logp)
            bonus = self.algorithm.entropy_coef * token_weights(
                self.counted[part], self.algorithm.loss_agg_mode, self.algorithm.response_length
            )
            loss -= float((bonus * entropy).sum())
            optimizer.zero_grad()
            for row, *slopes in zip(rows, gradient, -bonus, strict=True):
                slopes = [torch.tensor(slope[: len(row[0])], dtype=torch.float32) for slope in slopes]
                torch.autograd.backward(row, slopes)
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.learner.max_grad_norm)))
            optimizer.step()
            losses.append(loss)
            seen.append((part, logp, entropy))
        measured = self._of_mismatch(self.old if self.algorithm.old_logprobs == "recompute" else seen[0][1], seen[0][0])
        found = {**self._of_objective(seen), **measured}
        return {
            **self._flops(),
            "learning_rate": self.rate,
            "mini_batches_not_applied": 0,
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            **found,
            **self._of_clip(found, before, seen[0][0]),
            **self.correction,
        }

    def _look(self) -> Any:
        """The log-probs [B, T] at the present weights."""
        with torch.no_grad():
            return self._numbers(self.policy)

    def _flops(self) -> dict[str, float]:
        """Figures of a Qwen3: by hand from its configuration, token by token."""
        c, a = self.policy.config, self.algorithm
        has_loss = a.use_kl_loss or a.entropy_coef or (self.teacher.used and self.teacher.kl_in == "loss")
        training = sampling = 0.0
        for record, counted, A in zip(self.kept, self.mask, self.counted * self.advantage, strict=True):
            passes = (a.old_logprobs == "recompute") + a.needs_reference + (3 if A.any() or has_loss else 1)
            for context, start, end in _branches(record):
                if not counted[start:end].any():
                    continue
                read = len(context) + np.flatnonzero(counted[start:end])[-1]
                num_counted = counted[start:end].sum()
                forward = _body_flops(c, read) + 2 * c.vocab_size * c.hidden_size * num_counted
                training += passes * forward
                sampling += forward - (_body_flops(c, len(context)) if start == 0 else 0)
                if self.teacher.used:
                    t = self.taught.config
                    training += _body_flops(t, read) + 2 * t.vocab_size * t.hidden_size * num_counted
        prompts = {record["group"]: len(record["prompt_token_ids"]) for record in self.kept}
        sampling += sum(_body_flops(c, prompt) for prompt in prompts.values())
        return {"train_flops": training, "generation_flops": sampling}

    def _of_objective(self, seen: Sequence[Any]) -> dict[str, float]:
        """Over all mini-batches, each at the weights that it was trained from."""
        order = np.concatenate([np.flatnonzero(part) for part, _, _ in seen])
        logp, entropy = (np.concatenate([one[k] for one in seen]) for k in (1, 2))
        old, ref, A, m = self.old[order], self.ref[order], self.advantage[order], self.counted[order]
        (low, high), dual = self.algorithm.clip, self.algorithm.dual_clip
        branch = None if self.branch is None else self.branch[order]
        ratio, delta = ratios(logp, old, m, self.algorithm.importance_sampling, branch), logp - old
        length = self.algorithm.pg_clip_reference_length
        *_, below, above, cut_low, cut_high = bounded(
            self.algorithm.objective, ratio, logp, old, A, low, high, dual, m, length, branch
        )
        cut = {"low": m & cut_low, "high": m & cut_high}
        of_sequences = list(sequences(m, branch))
        found = {
            "outside_clip_sequences": np.mean([(below | above)[i, tokens].any() for i, tokens in of_sequences]),
            "dual_clipped_tokens": ((A < 0) & (ratio > (dual or math.inf)))[m].mean(),
            "entropy": entropy[m].mean(),
            "k1": kl(old, logp, "k1")[m].mean(),
            "k3": kl(logp, old, "k3")[m].mean(),
            **_moments("token_log_ratio", delta[m]),
            **_moments("log_ratio", np.array([delta[i, tokens].mean() for i, tokens in of_sequences])),
            **_moments("advantage", A[m]),
        }
        for side, part in cut.items():
            found[f"clipped_sequences_{side}"] = np.mean([part[i, tokens].any() for i, tokens in of_sequences])
            found[f"clipped_tokens_{side}"] = part[m].mean()
        for unit in ("sequences", "tokens"):
            found[f"clipped_{unit}"] = found[f"clipped_{unit}_low"] + found[f"clipped_{unit}_high"]
        if self.algorithm.needs_reference:
            found["reference_kl"] = kl(logp, ref, self.algorithm.kl_kind)[m].mean()
        if self.teacher.used:
            found["teacher_kl"] = (logp - self.teacher_logp[order])[m].mean()
        return found

    def _of_mismatch(self, logp: Any, part: Any) -> dict[str, float]:
        """Figures of the tokens of the newest version, at the step's first weights."""
        if self.algorithm.old_logprobs == "recompute":
            part = np.ones(len(self.kept), dtype=bool)
        fresh, delta = self.fresh[part], logp - self.behavior[part]
        token = delta[fresh]
        branch = None if self.branch is None else self.branch[part]
        compared = [delta[i, tokens] for i, tokens in sequences(fresh, branch)]
        sequence = np.array([of_sequence.mean() for of_sequence in compared])
        found = {
            "mismatch_tokens": len(token),
            "sigma_token": token.std(ddof=1),
            "sigma_sequence": sequence.std(ddof=1),
        }
        if self.algorithm.objective != "clip":
            return found
        lengths = [int(tokens.sum()) for _, tokens in sequences(self.counted, self.branch)]
        noise = [(d.mean() * math.sqrt(len(d) / n), n) for d, n in self._of_whole_sequences(delta, fresh, part)]
        if self.algorithm.importance_sampling == "token":
            noise, lengths = [(d, 1) for d in token], [1]
        scale = np.array([math.sqrt((self.algorithm.pg_clip_reference_length or n) / n) for _, n in noise])
        low, high = self.algorithm.clip
        moved = np.expm1([x for x, _ in noise])
        found["noise_share"] = ((moved < -np.minimum(1, low * scale)) | (moved > high * scale)).mean()
        sigma = found["sigma_token"]
        found["noise_share_independent"] = np.mean(
            [self._outside(sigma / math.sqrt(n), token.mean(), low, high, n) for n in lengths]
        )
        sides = sorted(abs(moved) / scale)
        # The narrowest side that at most one sequence in a hundred is beyond, and the next of a hundred for each ten.
        narrowest = sides[len(sides) - 1 - len(sides) // 100]
        return {**found, "noise_clip": 10 ** (math.ceil(math.log10(narrowest) * 100) / 100)}

    def _of_whole_sequences(self, delta: Any, fresh: Any, part: Any) -> Iterator[tuple[Any, int]]:
        """The differences of each sequence's compared tokens, and how many tokens it has that count."""
        counted, branch = self.mask[part], None if self.branch is None else self.branch[part]
        for i, tokens in sequences(counted, branch):
            compared = tokens & fresh[i]
            if compared.any():
                yield delta[i, compared], int(tokens.sum())

    def _outside(self, sigma: float, mean: float, low: float, high: float, length: int) -> float:
        """P(log s < log(1 - low)) + P(log s > log(1 + high)), log s ~ N(mean, sigma^2)."""
        scale = math.sqrt((self.algorithm.pg_clip_reference_length or length) / length)
        low, high = min(1.0, low * scale), high * scale
        below = math.erfc((mean - math.log(1 - low)) / sigma / math.sqrt(2)) / 2 if low < 1 else 0.0
        return below + math.erfc((math.log(1 + high) - mean) / sigma / math.sqrt(2)) / 2

    def _of_clip(self, found: Mapping[str, float], before: Any, first: Any) -> dict[str, float]:
        """Why sequences are outside the clip: all before the first update and after the last, or the first mini-batch.

        Some tokens are older.
        """
        a = self.algorithm
        if a.objective != "clip" or a.importance_sampling == "token":
            return {}
        of_all = list(sequences(self.counted, self.branch))
        scale = np.array(
            [math.sqrt((a.pg_clip_reference_length or tokens.sum()) / tokens.sum()) for _, tokens in of_all]
        )
        low, high = np.minimum(1, a.clip[0] * scale), a.clip[1] * scale

        def looked(logp: Any, of_rows: Any) -> tuple[float, float]:
            log_s = np.array([(logp - self.old)[i, tokens].mean() for i, tokens in of_all])
            outside = (np.exp(log_s) < 1 - low) | (np.exp(log_s) > 1 + high)
            taken = np.array([bool(of_rows[i]) for i, _ in of_all])
            return outside[taken].mean(), log_s[taken].std(ddof=1)

        every_row = np.ones_like(first)
        start, spread = looked(before, every_row if self.splits else first)
        parts = {"outside_clip_at_start": start, "log_ratio_std_at_start": spread}
        if self.splits:
            end, _ = looked(self._look(), every_row)
            parts |= {"outside_clip_at_end": end, "outside_clip_movement": end - start}
        if a.old_logprobs == "inference":
            parts |= {"outside_clip_noise": found["noise_share"], "outside_clip_lag": start - found["noise_share"]}
        if a.pg_clip_reference_length:
            parts |= {"clip_low_mean": low.mean(), "clip_high_mean": high.mean()}
        return parts

    def _corrected(self) -> tuple[Any, Any]:
        """Which tokens count after the behavior correction, and what it weighs them with."""
        a = self.algorithm
        if a.behavior_correction == "none":
            return self.mask, np.ones(self.mask.shape)
        assert a.behavior_correction == "mask"
        weight = behavior_weight(self.old, self.behavior, self.mask, a.behavior_level)
        least, most = a.behavior_bounds or (0.0, math.inf)
        outside = self.mask & ((weight < least) | (weight > most))
        counted = self.mask & ~outside
        self.correction = {
            "behavior_weight_mean": weight[self.mask].mean(),
            "behavior_weight_geomean": math.exp(np.log(weight[self.mask]).mean()),
            "behavior_weight_std": weight[self.mask].std(ddof=1),
            "behavior_outside": outside[self.mask].mean(),
            "skipped_behavior": (~counted.any(1)).sum(),
            "skipped_tokens_behavior": outside.sum(),
            "sequences": counted.any(1).sum(),
            "tokens": counted.sum(),
        }
        return counted, weight

    def _loss_and_gradient(self, part: Any, logp: Any) -> tuple[float, Any]:
        a, m = self.algorithm, self.counted[part]
        low, high = a.clip
        loss, gradient = loss_and_gradient(
            logp,
            self.old[part],
            self.advantage[part],
            m,
            a.importance_sampling,
            low,
            high,
            a.dual_clip,
            a.loss_agg_mode,
            a.response_length,
            a.objective,
            a.pg_clip_reference_length,
            None if self.branch is None else self.branch[part],
            turns=[record["num_turns"] for record, chosen in zip(self.kept, part, strict=True) if chosen],
        )
        if a.use_kl_loss:
            assert a.kl_kind == "k3"
            each, ref = token_weights(m, a.loss_agg_mode, a.response_length), self.ref[part]
            loss += float((a.kl_loss_coef * kl(logp, ref, "k3") * each)[m].sum())
            gradient = gradient + a.kl_loss_coef * (1 - np.exp(ref - logp)) * each
        if self.teacher.used and self.teacher.kl_in == "loss":
            each = self.teacher.coef * token_weights(m, a.loss_agg_mode, a.response_length)
            above = logp - self.teacher_logp[part]
            loss += float((each * above**2 / 2)[m].sum())
            gradient = gradient + each * above * m
        return loss, gradient

    def _logp_entropy(self, model: Any, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
        found: list[torch.Tensor] = []
        for context, start, end in _branches(record):
            ids = torch.tensor([*context, *record["token_ids"][start:end]])
            log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / self.temperature, -1)
            both = torch.stack([log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
            # Nothing predicts the first token of a further branch.
            found.append(both[:, len(context) - 1 :] if context else torch.nn.functional.pad(both, (1, 0)))
        logp, entropy = torch.cat(found, 1)
        return logp, entropy

    @torch.no_grad()
    def _numbers(self, model: Any) -> Any:
        return self._side_by_side([self._logp_entropy(model, record)[0].numpy() for record in self.kept])

    def _matrix(self, column: str) -> Any:
        return self._side_by_side([record[column] for record in self.kept])

    def _side_by_side(self, rows: Sequence[Any]) -> Any:
        matrix = np.zeros((len(rows), max(len(record["token_ids"]) for record in self.kept)))
        for values, row in zip(matrix, rows, strict=True):
            values[: len(row)] = row
        return matrix


def _branches(record: Record) -> list[tuple[list[int], int, int]]:
    """For each branch the context before the arrays, its first place there, and the place behind its last."""
    starts = record["branch_starts"]
    contexts = [record["prompt_token_ids"], *([] for _ in starts)]
    return list(zip(contexts, [0, *starts], [*starts, len(record["token_ids"])], strict=True))


def _body_flops(c: Any, num_tokens: int) -> float:
    """Operations of the layers of a Qwen3, over so many tokens."""
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer: float = c.hidden_size * (2 * heads + 2 * kv_heads + 3 * c.intermediate_size)
    return float(sum(2 * c.num_hidden_layers * (layer + 2 * heads * seen) for seen in range(1, num_tokens + 1)))


def _moments(name: str, values: Any) -> dict[str, float]:
    return {f"{name}_mean": values.mean(), f"{name}_std": values.std(ddof=1), f"{name}_max": np.abs(values).max()}
