"""The metrics of a step under their public names that follow from its rows alone, trained or not.

Those of its updates are the objective's, and times come from the learner's step clock.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from gspo.common.config.evaluation import MOST_PARTS
from gspo.common.telemetry.source_figures import SOURCE_FIGURES, source_figure
from gspo.learner.assembly.rows import Row
from gspo_core.figures import reward_stats
from gspo_core.stats import figures

# A phrase has so many tokens, and is looked for in so many answers of a step.
_PHRASE_TOKENS, _PHRASE_ANSWERS = 8, 64
_PHRASE_FACTORS = np.random.default_rng(0).integers(1 << 64, size=_PHRASE_TOKENS, dtype=np.uint64)
SKIP_REASONS = ("failed", "truncated", "stale")


def row_metrics(rows: Sequence[Row], step: int) -> dict[str, float]:
    """Rewards, lengths, skipped rollouts by reason, and how much is trained on in a step, of which age."""
    skipped = Counter(row.skipped for row in rows)
    lengths = [int(row.mask.sum()) for row in rows]
    counted = {
        **{f"skipped_{reason}": float(skipped[reason]) for reason in SKIP_REASONS},
        **{f"skipped_tokens_{reason}": float(_skipped_tokens(rows, reason)) for reason in SKIP_REASONS},
        "response_tokens_mean": math.fsum(lengths) / max(1, len(rows)),
        "truncated_share": sum(row.outcome == "truncated" for row in rows) / max(1, len(rows)),
        **_set_metrics(rows),
        **_answer_metrics(rows),
        **_phrase_metrics(rows),
        **_branch_metrics(rows),
        **_conversation_metrics(rows),
    }
    return counted | _reward_metrics(rows) | _source_metrics(rows) | _trained_metrics(rows, step)


def _set_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Tokens that ties leave out, and the mean number that a token was sampled from; empty without sampling.top_k."""
    sizes = [row.kept_sizes[row.mask] for row in rows if len(row.kept_sizes)]
    if not sizes:
        return {}
    size_N = np.concatenate(sizes)
    return {
        "skipped_tokens_tied": float(sum(row.num_tied for row in rows if row.skipped is None)),
        "kept_tokens_mean": float(size_N.mean()) if len(size_N) else 0.0,
    }


def _answer_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of the answers with an end token, and of the most frequent text; empty where a rollout has turns."""
    if not rows or any(row.turns_json for row in rows):
        return {}
    texts = Counter(row.text for row in rows)
    return {
        "eos_share": sum(row.outcome == "eos" for row in rows) / len(rows),
        "same_text_share": texts.most_common(1)[0][1] / len(rows),
    }


def _phrase_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The share of answers with the most frequent phrase, of one answer to each prompt; empty without any phrase."""
    one_each = list({row.group: row for row in rows}.values())[:_PHRASE_ANSWERS]
    phrases = [_phrases(row.token_ids[row.mask]) for row in one_each]
    if not sum(map(len, phrases)):
        return {}
    _, numbers = np.unique(np.concatenate(phrases), return_counts=True)
    return {"same_phrase_share": float(numbers.max()) / len(one_each)}


def _phrases(token_ids: np.ndarray) -> np.ndarray:
    """Hashes of the different runs of _PHRASE_TOKENS tokens of an answer."""
    if len(token_ids) < _PHRASE_TOKENS:
        return np.zeros(0, dtype=np.uint64)
    return np.unique(sliding_window_view(token_ids.astype(np.uint64) + 1, _PHRASE_TOKENS) @ _PHRASE_FACTORS)


def _length_correlation(scored: Sequence[Row]) -> dict[str, float]:
    """Pearson's correlation of an answer's reward and its tokens, both as differences to the means of their group.

    Empty where one of them does not differ within any group.
    """
    by_group: dict[int, list[tuple[float, int]]] = {}
    for row in scored:
        by_group.setdefault(row.group, []).append((float(row.reward or 0.0), int(row.mask.sum())))
    pairs = np.concatenate([np.array(group) - np.mean(group, axis=0) for group in by_group.values()])
    rewards_B, lengths_B = pairs.T
    scale = math.sqrt(float(rewards_B @ rewards_B) * float(lengths_B @ lengths_B))
    return {"reward_length_correlation": float(rewards_B @ lengths_B) / scale} if scale > 0 else {}


def _reward_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Figures of the rewards; empty if no row has one."""
    scored = [row for row in rows if row.reward is not None]
    if not scored:
        return {}
    rewards_B = torch.tensor([row.reward for row in scored], dtype=torch.float64)
    reward = figures(reward_stats(rewards_B, torch.tensor([row.group for row in scored])))
    reward |= {"reward_min": float(rewards_B.min()), "reward_max": float(rewards_B.max())}
    return reward | _part_means(scored) | _length_correlation(scored)


def _source_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of each source that has a name."""
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    by_source.pop("", None)
    of_sources: dict[str, float] = {}
    for source, own in by_source.items():
        seen = _reward_metrics(own) | {
            "groups": float(len({row.group for row in own})),
            "response_tokens_mean": math.fsum(int(row.mask.sum()) for row in own) / len(own),
        }
        of_sources |= {source_figure(source, name): seen[name] for name in SOURCE_FIGURES if name in seen}
    return of_sources


def _branch_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Branches of a rollout; empty if each has one."""
    numbers = [1 + len(row.branch_starts) for row in rows]
    return {"branches_mean": sum(numbers) / len(numbers)} if max(numbers, default=1) > 1 else {}


def _conversation_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Turns, tool calls and how conversations ended; empty if every rollout is one answer."""
    talked = [row for row in rows if row.turns_json]
    if not talked:
        return {}
    ends = Counter(row.outcome for row in rows)
    done = [row.num_turns for row in talked if row.outcome == "environment_done"]
    return {
        **({"turns_done_mean": sum(done) / len(done)} if done else {}),
        "turns_mean": sum(row.num_turns for row in talked) / len(talked),
        "turn_tokens_mean": sum(int(row.mask.sum()) for row in talked) / sum(row.num_turns for row in talked),
        "tool_calls_mean": sum(row.num_tool_calls for row in talked) / len(talked),
        "malformed_calls_mean": sum(row.num_malformed_calls for row in talked) / len(talked),
        "cut_turns_mean": sum(row.num_cut_turns for row in talked) / len(talked),
        **{f"ended_{outcome}": number / len(rows) for outcome, number in sorted(ends.items())},
    }


def _part_means(scored: Sequence[Row]) -> dict[str, float]:
    """Means of the reward's parts by name, if it has several."""
    values: dict[str, list[float]] = {}
    for row in scored:
        parts = json.loads(row.parts_json)
        for part in parts if len(parts) > 1 else []:
            if part["value"] is not None:
                values.setdefault(part["name"], []).append(part["value"])
    return {f"part_{name}_mean": math.fsum(part) / len(part) for name, part in list(values.items())[:MOST_PARTS]}


def _skipped_tokens(rows: Sequence[Row], reason: str) -> int:
    """Sampled tokens of skipped rollouts; under stale also those that left the mask of another rollout."""
    tokens = sum(row.num_sampled for row in rows if row.skipped == reason)
    if reason == "stale":
        tokens += sum(row.num_sampled - int(row.mask.sum()) - row.num_tied for row in rows if row.skipped is None)
    return tokens


def _trained_metrics(rows: Sequence[Row], step: int) -> dict[str, float]:
    """How much a step trains on, and the age of its tokens in versions."""
    trained = [row for row in rows if row.skipped is None and row.mask.any()]
    ages = np.concatenate([step - 1 - row.version[row.mask] for row in trained]) if trained else np.zeros(0)
    return {
        "tokens": float(len(ages)),
        "sequences": float(len(trained)),
        "groups": float(len({row.group for row in trained})),
        "age_mean": float(ages.mean()) if trained else 0.0,
        "age_max": float(ages.max(initial=0)),
    }
