"""The rules on learning: whether the rewards teach, and whether the policy gets better or breaks.

Their bounds are rules of thumb. tests/planted has runs with the faults, and what the rules say of them.
"""

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import fmean, median, stdev

from gspo.common.config.evaluation import BoundsConfig
from gspo.common.config.schema import Config
from gspo.common.telemetry.findings import (
    HELD_OUT,
    HELD_OUT_ERROR,
    Rule,
    Said,
    Steps,
    apply_rules,
    ends,
    in_errors,
    is_annealed,
    moved,
)
from gspo.common.telemetry.source_figures import named_sources, source_figure

# Steps over which a trend is judged, from the mean of the first fifth to that of the last.
TREND_STEPS, TREND_PARTS = 10, 5
# Of a reward, whose errors are large: from the first third to the last.
REWARD_PARTS = 3
# Steps over which two figures part: their errors come from the scatter of these steps alone, so there are more of them.
PARTING_STEPS = 20
# Steps after which a reward that stands still is worth a sentence, and the least move, in spreads of the reward.
FLAT_STEPS, FLAT_MOVE = 50, 0.1
# Shares above which a step teaches little: of groups with equal rewards, of answers cut off.
MOST_EQUAL, MOST_CUT = BoundsConfig().weak_signal, BoundsConfig().cut_off
# Of the range of the rewards: a mean so near to the least reward is of answers that are hardly ever right.
RARELY_RIGHT = 0.05
# Correlations of length with reward that are worth a sentence.
LENGTH_PAYS, LENGTH_IS_ALL = 0.5, 0.8
# A change of the answers' length, of their share with one phrase, and that share, which may explain a higher reward.
LENGTH_FACTOR, PHRASE_SHARE, PHRASE_RISE = 1.2, 0.5, 0.25
_LENGTH, _PHRASE = "response_tokens_mean", "same_phrase_share"
# Share outside the clip at a step's first weights, and age of its tokens in versions, that are worth a sentence.
STALE_SHARE, STALE_AGE = 0.3, 2.0
# Measurements of the engines' noise, which vary tenfold from one to the next, that are compared with all before.
NEWEST_NOISES = 5
# Factors between the first and the last steps of a trend.
_COLLAPSE, _GROWTH, _EXPLOSION = 0.1, 3.0, 50.0
# Least KL to the first policy, entropy, and noise of the engines, in nats a token, that are worth a sentence.
_LARGE_KL, _LARGE_ENTROPY, _LARGE_NOISE = 0.5, 2.0, 0.01
# A mean has moved if it did so by so many standard errors.
_STANDARD_ERRORS, _REWARD_ERRORS, _FIRST_ERRORS = 4.0, 3.0, 2.0
_RATE = "a lower learner.learning_rate"
_NEVER_RIGHT = (
    "the reward function looks for another form of the answer, or at another column",
    "the chat template lacks the place of the answer",
)
_TRY_REWARD = ("`gspo reward try` with answers of the log",)


def has_signal(steps: Steps, config: Config) -> bool:
    """Whether the last steps teach anything; without it speed is of no use."""
    return not apply_rules([_NO_SIGNAL, _NO_GRADIENT], steps, config)


def _groups_give_signal(config: Config) -> bool:
    """Whether equal rewards in a group teach nothing; a teacher, or the rest of the batch, may teach."""
    return config.algorithm.reward_norm in ("group", "leave_one_out") and not config.teacher.used


def _cut_causes(steps: Steps, config: Config) -> Said:
    share, length = steps[-1]["truncated_share"], config.algorithm.response_length
    seen = f"{share:.0%} of the answers are cut off at algorithm.response_length {length}"
    never = "no answer has an end token: the tokenizer's eos_token, or generation.stop, is not what the policy samples"
    template = "the chat template lacks the place of the answer, or the policy was not trained on this one"
    ends_somewhere = steps[-1].get("eos_share", 1.0) > 0
    causes = ("the limit is too short for these answers", template) if ends_somewhere else (never, template)
    longer = f"algorithm.response_length above {length}"
    samples = "reading some answers to their end: `gspo doctor --sample`, or the page"
    return Said(seen, causes, (longer, samples) if ends_somewhere else (samples, longer))


def _no_signal_says(steps: Steps, config: Config) -> Said:
    newest = steps[-1]
    low, high = newest.get("reward_min", 0.0), newest.get("reward_max", 1.0)
    seen = "the answers to each prompt have equal rewards, so no step teaches anything"
    if newest.get("truncated_share", 0.0) > MOST_CUT:
        cut = _cut_causes(steps, config)
        return Said(f"{seen}; {cut.seen}", cut.causes, cut.tries)
    if low == high > 0:
        learned = ("each answer is right by now", "the reward function pays every answer alike")
        return Said(f"{seen}; every answer gets {low:g}", learned, ("other prompts beside these", *_TRY_REWARD))
    if low == high:
        causes = (*_NEVER_RIGHT, "no answer of this policy is right")
        return Said(f"{seen}; every answer gets {low:g}", causes, _TRY_REWARD)
    more = f"algorithm.num_return_sequences_in_group above {config.algorithm.num_return_sequences_in_group}"
    return Said(seen, ("each prompt is too easy or too hard",), ("other prompts beside these", more))


def _weak_says(steps: Steps, config: Config) -> Said:
    share, newest = fmean(step["zero_spread_groups"] for step in steps), steps[-1]
    num = config.algorithm.num_return_sequences_in_group
    low, high = newest.get("reward_min", 0.0), newest.get("reward_max", 1.0)
    is_rare = newest.get("reward_mean", high) - low < RARELY_RIGHT * (high - low)
    return Said(
        f"{share:.0%} of the groups have equal rewards and teach nothing",
        (*(_NEVER_RIGHT if is_rare else ()), "most prompts are too easy or too hard for this policy"),
        (
            *(_TRY_REWARD if is_rare else ()),
            "algorithm.filter_zero_spread: true",
            "data.curriculum: spread",
            f"more than {num} answers to a prompt",
        ),
    )


def _trend(figure: str, seen: str, causes: tuple[str, ...], tries: tuple[str, ...]) -> Callable[[Steps, Config], Said]:
    """Words of a trend; `seen` has the figure's first and last values and the number of steps."""

    def says(steps: Steps, _config: Config) -> Said:
        first, last = _ends(steps, figure)
        return Said(seen.format(first=first, last=last, steps=len(steps)), causes, tries)

    return says


def _ends(steps: Steps, figure: str) -> tuple[float, float]:
    return ends([step[figure] for step in steps], TREND_PARTS)


def _reward_moved(steps: Steps) -> float:
    """How far the mean reward rose, in standard errors, with one reward counted a group."""
    first, last = ends([step["reward_mean"] for step in steps], REWARD_PARTS)
    variances = [step["reward_std"] ** 2 / max(1.0, step["groups"]) for step in steps]
    error = math.sqrt(sum(ends(variances, REWARD_PARTS)) / (len(steps) // REWARD_PARTS))
    return in_errors(last - first, error)


def _is_flat(steps: Steps, config: Config) -> bool:
    """Whether groups differ in reward, so there is something to learn, and the mean stands still far from the best."""
    first, last = _ends(steps, "reward_mean")
    least, best = min(step["reward_min"] for step in steps), max(step["reward_max"] for step in steps)
    if is_annealed(steps, config) or best - last < FLAT_MOVE * (best - least):
        return False
    spread = fmean(step["reward_std"] for step in steps)
    has_spread = fmean(step["zero_spread_groups"] for step in steps) < MOST_EQUAL
    return has_spread and abs(last - first) < FLAT_MOVE * spread and _reward_moved(steps) < _FIRST_ERRORS


def _norms(steps: Steps) -> tuple[float, float]:
    """The usual gradient norm, and the second largest of the newest three: one alone may be of a single odd answer."""
    norms = [step["grad_norm"] for step in steps]
    return median(norms), sorted(norms[-3:])[-2]


def _explodes(steps: Steps, _config: Config) -> bool:
    usual, twice = _norms(steps)
    return usual > 0 and twice > _EXPLOSION * usual


def _explodes_says(steps: Steps, _config: Config) -> Said:
    usual, twice = _norms(steps)
    return Said(
        f"the gradient norm was {twice:.3g} or more in two of the last three steps, and {usual:.3g} is usual in the "
        f"last {len(steps)}",
        ("single answers of a kind that was not there before", "an update before it that was too large"),
        (_RATE, "a lower learner.max_grad_norm"),
    )


def _grows(figure: str, least: float) -> Callable[[Steps, Config], bool]:
    def holds(steps: Steps, _config: Config) -> bool:
        first, last = _ends(steps, figure)
        return last > least and last > _GROWTH * first

    return holds


def _collapses(steps: Steps, _config: Config) -> bool:
    first, last = _ends(steps, "entropy")
    return first > 0 and last < _COLLAPSE * first


def _above(figure: str, bound: Callable[[BoundsConfig], float]) -> Callable[[Steps, Config], bool]:
    return lambda steps, config: all(step[figure] > bound(config.rules.bounds) for step in steps)


def _all_equal(steps: Steps, _config: Config) -> bool:
    return all(step["zero_spread_groups"] >= 1 for step in steps)


def _has_no_gradient(steps: Steps, config: Config) -> bool:
    return all(step["grad_norm"] == 0 for step in steps) and not _all_equal(steps, config)


def _no_gradient_says(steps: Steps, config: Config) -> Said:
    newest, algorithm = steps[-1], config.algorithm
    causes, tries = [], []
    masks = algorithm.mask_truncated or algorithm.mask_truncated_completions
    if masks and newest.get("truncated_share", 0.0) > MOST_CUT:
        causes.append(f"{newest['truncated_share']:.0%} of the answers are cut off, and those are not trained on")
        tries.append(f"algorithm.response_length above {algorithm.response_length}")
    if max(newest.get("clipped_sequences", 0.0), newest.get("clipped_tokens", 0.0)) > MOST_EQUAL:
        causes.append("nearly all of the signal is clipped")
        tries.append("a wider clip (algorithm.pg_clip_low, pg_clip_high)")
    return Said(
        f"the gradient was 0 in {len(steps)} steps although groups differ in reward, so no step teaches anything",
        (*causes, "a mask, a weight or a coefficient of 0 takes the advantages away"),
        (*tries, "reading advantages and skipped rollouts on the page"),
    )


def _mostly_equal(steps: Steps, config: Config) -> bool:
    if len(steps) > 1 and _is_near_best(steps):
        # A run that has learned its prompts; a model that knows them before any step is worth a sentence.
        return False
    return _above("zero_spread_groups", lambda bounds: bounds.weak_signal)(steps, config) and not _all_equal(
        steps[-3:], config
    )


def _is_near_best(steps: Steps) -> bool:
    """Whether the mean reward is within a tenth of its range of the best one."""
    least = min(step.get("reward_min", 0.0) for step in steps)
    best = max(step.get("reward_max", 1.0) for step in steps)
    return best - fmean(step.get("reward_mean", least) for step in steps) < FLAT_MOVE * (best - least)


def _noises(steps: Steps) -> tuple[float, float, float]:
    """The engines' noise at the newest measurements and before them (geometric means), and its rise in errors."""
    logs = [math.log(max(step["sigma_token"], 1e-9)) for step in steps]
    before, newest = logs[:-NEWEST_NOISES], logs[-NEWEST_NOISES:]
    error = max(stdev(before), stdev(newest)) * math.sqrt(1 / len(before) + 1 / len(newest))
    rise = fmean(newest) - fmean(before)
    return math.exp(fmean(newest)), math.exp(fmean(before)), in_errors(rise, error)


def _noise_grows(steps: Steps, _config: Config) -> bool:
    newest, before, errors = _noises(steps)
    return newest > max(_LARGE_NOISE, _GROWTH * before) and errors > _STANDARD_ERRORS


def _noise_says(steps: Steps, _config: Config) -> Said:
    newest, before, _ = _noises(steps)
    return Said(
        f"the noise between the engines' log-probs rose from {before:.2g} to {newest:.2g} nats a token",
        ("tokens of low probability are sampled more often", "the weights of a generator are not the learner's"),
        ("generation.dtype: float32, which a resume takes", _RATE),
    )


def _failed_share(step: Mapping[str, float], config: Config) -> float:
    """Rollouts without a score, with those of groups that failed as a whole, as a share of these and the trained."""
    of_groups = step.get("groups_failed", 0.0) * config.algorithm.num_return_sequences_in_group
    failed = step["skipped_failed"] + of_groups
    return failed / max(1.0, failed + step["sequences"])


def _failed_says(steps: Steps, config: Config) -> Said:
    share = fmean(_failed_share(step, config) for step in steps)
    plays = config.environment.used or config.agent.used
    whose = "the environment or the agent" if plays else "the reward function"
    return Said(
        f"{share:.0%} of the rollouts have no score, or failed with their group, and nothing is learned from them",
        (f"{whose} fails alike each time", "a time limit is too short"),
        ("reading the failures in `gspo status`, or on the page",),
    )


def _most_fail(steps: Steps, config: Config) -> bool:
    return all(_failed_share(step, config) > config.rules.bounds.rollouts_fail for step in steps)


def _not_applied_says(steps: Steps, _config: Config) -> Said:
    number = sum(step["mini_batches_not_applied"] for step in steps)
    return Said(
        f"{number:.0f} updates of the last {len(steps)} steps were not applied: their loss or gradient was not finite",
        ("a reward or a log-prob that is very large", "an update before them that was too large"),
        (_RATE, "a lower learner.max_grad_norm", "reading log/not_applied.jsonl"),
    )


def _length_pays(steps: Steps, _config: Config) -> bool:
    first, last = _ends(steps, "response_tokens_mean")
    correlation = fmean(step["reward_length_correlation"] for step in steps)
    return correlation > LENGTH_IS_ALL or (correlation > LENGTH_PAYS and last > 1.2 * first)


def _length_says(steps: Steps, _config: Config) -> Said:
    first, last = _ends(steps, "response_tokens_mean")
    correlation = fmean(step["reward_length_correlation"] for step in steps)
    return Said(
        f"within groups longer answers get more reward (correlation {correlation:.2f}), and answers went from "
        f"{first:.1f} to {last:.1f} tokens within {len(steps)} steps",
        ("the reward counts length, or something that comes with it, instead of being right",),
        (
            "a reward that a longer answer cannot raise",
            "algorithm.overlong_buffer, which takes reward from long answers",
        ),
    )


def _alike_says(steps: Steps, _config: Config) -> Said:
    share = fmean(step["same_text_share"] for step in steps)
    return Said(
        f"{share:.0%} of a step's answers are the same text to different prompts, in {len(steps)} steps",
        ("the reward function pays for this text", "the policy has collapsed", "the prompts do not reach the policy"),
        ("reading the answers and their rewards on the page", _RATE),
    )


def _starves(steps: Steps, config: Config) -> bool:
    size = config.algorithm.rollout_batch_size
    return all(step["groups_filtered"] > _GROWTH * size for step in steps)


def _starves_says(steps: Steps, config: Config) -> Said:
    filtered = fmean(step["groups_filtered"] for step in steps)
    return Said(
        f"a step of {config.algorithm.rollout_batch_size} groups takes {filtered:.0f} more that are filtered, since "
        "their rewards are equal: most of the generation is for nothing",
        ("most prompts are too easy or too hard for this policy by now",),
        ("data.curriculum: spread, which chooses prompts by their pass rate", "other prompts beside these"),
    )


def _held_out_before(steps: Steps) -> Mapping[str, float] | None:
    """The earlier evaluation that the newest is below: by more errors the best, else the first; None if it is not.

    The best of many is high by chance too, so it needs more errors.
    """
    *earlier, newest = steps
    best = max(earlier, key=lambda step: step[HELD_OUT])
    for before, errors in ((best, _STANDARD_ERRORS), (earlier[0], _FIRST_ERRORS)):
        error = math.hypot(before[HELD_OUT_ERROR], newest[HELD_OUT_ERROR])
        if before[HELD_OUT] - newest[HELD_OUT] > max(errors * error, 1e-9):
            return before
    return None


def _moved_too(before: Mapping[str, float], newest: Mapping[str, float]) -> list[str]:
    """Other moves of the training answers, by which a reward may rise without any of them being better."""
    causes = []
    parts = {name: newest[name] - before[name] for name in before if name.startswith("part_") and name in newest}
    up, down = (pick(parts, key=lambda name: parts[name], default="") for pick in (max, min))
    if up and parts[up] > 0 > parts[down]:
        rose, fell = up[5:-5], down[5:-5]
        causes.append(f"the part {rose} of the training reward rose by {parts[up]:.2g} while {fell} fell")
    shorter, longer = sorted((before.get(_LENGTH, 0.0), newest.get(_LENGTH, 0.0)))
    if 0 < LENGTH_FACTOR * shorter < longer:
        causes.append(f"answers went from {before[_LENGTH]:.1f} to {newest[_LENGTH]:.1f} tokens")
    if newest.get(_PHRASE, 0.0) > PHRASE_SHARE and newest[_PHRASE] - before.get(_PHRASE, 1.0) > PHRASE_RISE:
        causes.append(f"{newest[_PHRASE]:.0%} of the answers share one phrase, {before[_PHRASE]:.0%} did before")
    return causes


def _held_out_says(steps: Steps, _config: Config) -> Said:
    before, newest = _held_out_before(steps) or steps[0], steps[-1]
    rises = newest.get("reward_mean", 0.0) > before.get("reward_mean", math.inf)
    moved_too = _moved_too(next((step for step in steps if "reward_mean" in step), newest), newest)
    meanwhile = "while the training reward rose" if rises else "and the training reward did not rise either"
    hacked = "the reward pays for something else than being right", "the training prompts are learned by heart"
    return Said(
        f"the held-out reward fell from {before[HELD_OUT]:.3g} to {newest[HELD_OUT]:.3g} (standard errors "
        f"{before[HELD_OUT_ERROR]:.2g} and {newest[HELD_OUT_ERROR]:.2g}), {meanwhile}",
        (*moved_too, *(hacked if rises else ("updates are too large, or of noise alone",))),
        ("reading held-out answers", _RATE, "evaluation.keep_best, which keeps the best version"),
    )


def _has_lag(config: Config) -> bool:
    return config.staleness.max_lag > 0 and config.algorithm.old_logprobs == "inference"


def _is_stale(steps: Steps, _config: Config) -> bool:
    """Whether lag, not the engines' noise, puts many sequences outside the clip before the first update."""
    return all(
        step["age_mean"] > STALE_AGE and step["outside_clip_at_start"] - step.get("noise_share", 0.0) > STALE_SHARE
        for step in steps
    )


def _stale_says(steps: Steps, config: Config) -> Said:
    newest = steps[-1]
    return Said(
        f"a step's tokens are {newest['age_mean']:.1f} versions old, and before its first update "
        f"{newest['outside_clip_at_start']:.0%} of its sequences are outside the clip",
        ("the policy moves faster than the rollouts arrive",),
        (
            f"staleness.max_lag below {config.staleness.max_lag}",
            _RATE,
            "a wider clip (algorithm.pg_clip_low, pg_clip_high) while held-out reward rises",
        ),
    )


def _moves_much(steps: Steps, figure: str) -> bool:
    """Whether a figure moved by a tenth of itself. A curriculum moves a reward by less, and by more than its errors."""
    first, last = ends([step[figure] for step in steps], REWARD_PARTS)
    return abs(last - first) >= FLAT_MOVE * max(abs(first), abs(last))


def _parted(figure: Callable[[str], str], names: list[str], steps: Steps) -> tuple[str, str] | None:
    """(rising, falling): two of the names whose figures part; None without any."""
    there = [name for name in names if all(figure(name) in step for step in steps) and _moves_much(steps, figure(name))]
    moves = {name: moved(steps, figure(name)) for name in there}
    for rising, falling in combinations(sorted(moves, key=lambda name: moves[name], reverse=True), 2):
        if moves[rising] > _STANDARD_ERRORS and moves[falling] < -_STANDARD_ERRORS:
            return rising, falling
    return None


def _parted_sources(steps: Steps) -> tuple[str, str] | None:
    return _parted(lambda name: source_figure(name, "reward_mean"), named_sources(steps[-1:]), steps)


def _parted_rewards(steps: Steps) -> tuple[str, str] | None:
    names = [name[5:-5] for name in steps[-1] if name.startswith("part_") and name.endswith("_mean")]
    return _parted("part_{}_mean".format, names, steps)


def _sources_say(steps: Steps, _config: Config) -> Said:
    rising, falling = _parted_sources(steps) or ("", "")
    return Said(
        f"the reward of the source {rising} rises while that of {falling} falls, within {len(steps)} steps",
        (f"{rising} has more of the signal", "their answers want different forms"),
        (f"a larger weight of {falling} in data.sources", _RATE),
    )


def _parts_say(steps: Steps, _config: Config) -> Said:
    rising, falling = _parted_rewards(steps) or ("", "")
    return Said(
        f"{rising} rises while {falling} falls, within {len(steps)} steps: the parts of the reward part",
        (f"the policy gains more by {rising} than it loses by {falling}",),
        (f"other weights in reward.functions, so that {rising} cannot pay for {falling}",),
    )


_NO_SIGNAL = Rule("no_signal", ("zero_spread_groups",), 3, _all_equal, _no_signal_says, _groups_give_signal)
_NO_GRADIENT = Rule("no_gradient", ("grad_norm", "zero_spread_groups"), 3, _has_no_gradient, _no_gradient_says)
_WEAK_SIGNAL = Rule("weak_signal", ("zero_spread_groups",), 5, _mostly_equal, _weak_says, _groups_give_signal)
_CUT_OFF = Rule(
    "cut_off",
    ("truncated_share",),
    3,
    _above("truncated_share", lambda bounds: bounds.cut_off),
    _cut_causes,
    rollouts="/rollouts?step={step}&outcome=truncated",
)
LEARNING_RULES = (
    _NO_SIGNAL,
    _NO_GRADIENT,
    _WEAK_SIGNAL,
    _CUT_OFF,
    Rule(
        "rollouts_fail",
        ("skipped_failed", "sequences"),
        3,
        _most_fail,
        _failed_says,
        rollouts="/rollouts?step={step}&skipped=failed",
    ),
    Rule(
        "held_out_falls",
        (HELD_OUT, HELD_OUT_ERROR),
        2,
        lambda steps, _config: _held_out_before(steps) is not None,
        _held_out_says,
        is_measured=True,
    ),
    Rule(
        "reward_falls",
        ("reward_mean", "reward_std", "groups"),
        TREND_STEPS,
        lambda steps, _config: _reward_moved(steps) < -_REWARD_ERRORS,
        _trend(
            "reward_mean",
            "the reward fell from {first:.3g} to {last:.3g} within {steps} steps, by more than its errors",
            ("updates are too large", "the clip is too wide", "the prompts became harder"),
            (_RATE, "a narrower clip (algorithm.pg_clip_low, pg_clip_high)"),
        ),
    ),
    Rule(
        "reward_flat",
        ("reward_mean", "reward_std", "reward_min", "reward_max", "groups", "zero_spread_groups"),
        FLAT_STEPS,
        _is_flat,
        _trend(
            "reward_mean",
            "groups differ in reward, and its mean stood still within {steps} steps: {first:.3g}, then {last:.3g}",
            ("updates are too small", "most of the signal is clipped", "the reward is noise"),
            ("a higher learner.learning_rate", "a wider clip (algorithm.pg_clip_low, pg_clip_high)"),
        ),
    ),
    Rule("length_pays", ("reward_length_correlation", "response_tokens_mean"), 5, _length_pays, _length_says),
    Rule(
        "answers_alike",
        ("same_text_share",),
        5,
        _above("same_text_share", lambda bounds: bounds.answers_alike),
        _alike_says,
    ),
    Rule(
        "entropy_collapses",
        ("entropy",),
        TREND_STEPS,
        _collapses,
        _trend(
            "entropy",
            "the entropy fell from {first:.2g} to {last:.2g} nats a token within {steps} steps: answers to a prompt "
            "become one",
            ("updates are too large", "rewards pay for one form of answer"),
            (_RATE, "algorithm.entropy_coef", "a narrower algorithm.pg_clip_low"),
        ),
    ),
    Rule(
        "entropy_grows",
        ("entropy",),
        TREND_STEPS,
        _grows("entropy", _LARGE_ENTROPY),
        _trend(
            "entropy",
            "the entropy rose from {first:.2g} to {last:.2g} nats a token within {steps} steps: answers become noise",
            ("updates are too large", "algorithm.entropy_coef is too high"),
            (_RATE, "a lower algorithm.entropy_coef"),
        ),
    ),
    Rule(
        "kl_runs_away",
        ("reference_kl",),
        TREND_STEPS,
        _grows("reference_kl", _LARGE_KL),
        _trend(
            "reference_kl",
            "the KL to the first policy rose from {first:.2g} to {last:.2g} nats a token within {steps} steps",
            ("updates are too large",),
            ("a larger algorithm.kl_loss_coef", _RATE),
        ),
    ),
    Rule("gradient_explodes", ("grad_norm",), TREND_STEPS, _explodes, _explodes_says),
    Rule(
        "updates_not_applied",
        ("mini_batches_not_applied",),
        3,
        lambda steps, _config: all(step["mini_batches_not_applied"] > 0 for step in steps),
        _not_applied_says,
    ),
    Rule(
        "mismatch_grows",
        ("sigma_token",),
        3 * NEWEST_NOISES,
        _noise_grows,
        _noise_says,
        is_measured=True,
    ),
    Rule("policy_is_stale", ("age_mean", "outside_clip_at_start"), 3, _is_stale, _stale_says, _has_lag),
    Rule("curriculum_starves", ("groups_filtered",), 5, _starves, _starves_says),
    Rule(
        "sources_part",
        ("reward_mean",),
        PARTING_STEPS,
        lambda steps, _config: _parted_sources(steps) is not None,
        _sources_say,
    ),
    Rule(
        "rewards_part",
        ("reward_mean",),
        PARTING_STEPS,
        lambda steps, _config: _parted_rewards(steps) is not None,
        _parts_say,
    ),
)
