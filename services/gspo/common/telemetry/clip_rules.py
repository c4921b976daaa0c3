"""The rules on the objective: the clip, the weights of a correction, the turns of conversations, the batch."""

from statistics import median

from gspo.common.config.schema import Config
from gspo.common.telemetry.clip_causes import clip_causes, clip_causes_line
from gspo.common.telemetry.findings import Rule, Said, Steps, ends, is_annealed

# Above the bound of `clipped_too_much` most of the signal of the reward is lost. A toy run with lag 1 went from 0.16 to
# 0.48 and gained half as much.
CLIPPED_STEPS = 10
NEVER_CLIPPED_STEPS = 20
# Newest measurements of the noise whose median is judged.
NOISE_MEASUREMENTS = 5
# Share of sequences that would leave the clip at an unchanged policy, of which most is noise.
NOISE_TOO_MUCH = 0.33
# Geometric mean of the weights of a product. Half of the answers are below it where the logarithms are symmetric.
WEIGHED_DOWN, WEIGHED_STEPS = 0.5, 5
# Over TURN_STEPS steps, turns of conversations that are so much shorter and so many more. Elsewhere, dividing by an
# answer's own tokens made turns 80 % shorter and 56 % more, without gain.
TURN_STEPS = 20
TURNS_SHORTER, TURNS_MORE = 0.8, 1.1
# A replay must make the same bits, so no resume takes them.
_FIXED = "in a new run with model.path at this one's export/, since no resume takes keys of algorithm"


def _unit(config: Config) -> str:
    """The unit of the clip: the ratio is a token's under `token`, a sequence's otherwise."""
    return "tokens" if config.algorithm.importance_sampling == "token" else "sequences"


def _is_clipped(steps: Steps, config: Config) -> bool:
    return min(step[f"clipped_{_unit(config)}"] for step in steps) > config.rules.bounds.clipped_too_much


def _clipped_says(steps: Steps, config: Config) -> Said:
    causes, line = clip_causes(steps), clip_causes_line(steps, config)
    remedies = {"movement": "a wider clip (algorithm.pg_clip_low, pg_clip_high)"}
    if config.algorithm.old_logprobs == "inference" and not config.algorithm.bounds_divergence:
        remedies["noise"] = "algorithm.old_logprobs: recompute"
    if config.staleness.max_lag > 0:
        remedies["lag"] = f"staleness.max_lag below {config.staleness.max_lag}"
    # The remedy of the largest cause first.
    first = causes.largest if causes else ""
    ordered = sorted(remedies, key=lambda cause: cause != first)
    unit, bound = _unit(config), config.rules.bounds.clipped_too_much
    return Said(
        f"{steps[-1][f'clipped_{unit}']:.0%} of {unit} are clipped, over {bound:.0%} for {len(steps)} steps, so most "
        f"of the signal is lost{'. ' if line else ''}{line}",
        tries=(*(remedies[cause] for cause in ordered[:-1]), f"{remedies[ordered[-1]]}, {_FIXED}"),
    )


def _is_never_clipped(steps: Steps, config: Config) -> bool:
    return max(step[f"clipped_{_unit(config)}"] for step in steps) <= 0 and not is_annealed(steps, config)


def _silent_says(steps: Steps, config: Config) -> Said:
    low, high = config.algorithm.clip
    return Said(
        f"none of the {_unit(config)} was clipped in {len(steps)} steps at {low:g}/{high:g}, so the objective is not "
        "bounded",
        tries=(f"a narrower algorithm.pg_clip_low and pg_clip_high, if that is not meant, {_FIXED}",),
    )


def _noise_share(steps: Steps) -> float:
    """The median of the newest measurements. One is often of 16 sequences, and a single one of them above the bound."""
    return median(step["noise_share"] for step in steps[-NOISE_MEASUREMENTS:])


def _noise_says(steps: Steps, config: Config) -> Said:
    share, side = _noise_share(steps), steps[-1].get("noise_clip")
    wider = f"a wider clip: at {side:.2g} on both sides, noise puts at most 1 % outside" if side else "a wider clip"
    exact = () if config.generation.dtype == "float32" else ("generation.dtype: float32, which a resume takes",)
    return Said(
        f"the engines' numerical mismatch alone puts {share:.0%} of {_unit(config)} outside the clip"
        f"{', so clipping is noise' if share > NOISE_TOO_MUCH else ''}",
        tries=(*exact, "algorithm.old_logprobs: recompute", f"{wider}, {_FIXED}"),
    )


def _weighed_says(steps: Steps, _config: Config) -> Said:
    return Said(
        f"the geometric mean of the correction's weights is {steps[-1]['behavior_weight_geomean']:.2g} before their "
        f"bounds, below {WEIGHED_DOWN:g} for {len(steps)} steps",
        ("the product over an answer's tokens falls with its length",),
        ("a smaller staleness.max_lag", f"algorithm.behavior_level: geometric, {_FIXED}"),
    )


def _turns(steps: Steps) -> tuple[float, float]:
    """Tokens of a turn, and turns of a rollout: the last quarter of the steps as a share of the first."""
    pairs = (ends([step[name] for step in steps], 4) for name in ("turn_tokens_mean", "turns_mean"))
    shorter, more = (last / max(first, 1e-9) for first, last in pairs)
    return shorter, more


def _turns_shrink(steps: Steps, _config: Config) -> bool:
    shorter, more = _turns(steps)
    return shorter <= TURNS_SHORTER and more >= TURNS_MORE


def _turns_say(steps: Steps, config: Config) -> Said:
    shorter, more = _turns(steps)
    mode = "seq-mean-token-sum-turn-norm"
    other = () if config.algorithm.loss_agg_mode == mode else (f"algorithm.loss_agg_mode: {mode}, {_FIXED}",)
    return Said(
        f"within {len(steps)} steps a turn's tokens fell to {shorter:.0%} and turns rose to {more:.0%}",
        ("if the reward does not rise with them, the objective pays for short turns",),
        ("a reward that counts turns", *other),
    )


def _dropped(steps: Steps) -> float:
    return steps[-1].get("groups_filtered", 0.0) + steps[-1].get("groups_failed", 0.0)


def _is_small(steps: Steps, config: Config) -> bool:
    size, refill = config.algorithm.rollout_batch_size, config.algorithm.max_refill
    return steps[-1]["groups"] < size and _dropped(steps) >= refill * size


def _small_says(steps: Steps, config: Config) -> Said:
    algorithm = config.algorithm
    return Said(
        f"{steps[-1]['groups']:.0f} of {algorithm.rollout_batch_size} groups were trained, since {_dropped(steps):.0f} "
        f"were filtered or failed meanwhile, as many as algorithm.max_refill {algorithm.max_refill} allows",
        tries=("prompts that the policy sometimes answers right", f"a higher algorithm.max_refill, {_FIXED}"),
    )


def _clip_rules(unit: str) -> tuple[Rule, ...]:
    """The rules on the share of this unit; each applies where the clip is the unit's."""

    def takes_signal(config: Config) -> bool:
        """Whether clipped ones teach nothing; the clip of cispo bounds weights."""
        has_clip = not config.teacher.trains_by_loss_alone and config.algorithm.objective != "cispo"
        return has_clip and _unit(config) == unit

    share = (f"clipped_{unit}",)
    return (
        Rule("clipped_too_much", share, CLIPPED_STEPS, _is_clipped, _clipped_says, takes_signal),
        Rule("clip_is_silent", share, NEVER_CLIPPED_STEPS, _is_never_clipped, _silent_says, takes_signal),
    )


CLIP_RULES = (
    *_clip_rules("sequences"),
    *_clip_rules("tokens"),
    Rule(
        "clip_is_noise",
        ("noise_share",),
        1,
        lambda steps, config: _noise_share(steps) > config.rules.bounds.clip_is_noise,
        _noise_says,
        lambda config: not config.teacher.trains_by_loss_alone and config.algorithm.old_logprobs == "inference",
        is_measured=True,
    ),
    Rule(
        "answers_weighed_down",
        ("behavior_weight_geomean",),
        WEIGHED_STEPS,
        lambda steps, _config: max(step["behavior_weight_geomean"] for step in steps) < WEIGHED_DOWN,
        _weighed_says,
        lambda config: config.algorithm.behavior_level == "product",
    ),
    Rule("turns_shrink", ("turn_tokens_mean", "turns_mean"), TURN_STEPS, _turns_shrink, _turns_say),
    Rule("batch_is_small", ("groups",), 1, _is_small, _small_says),
)
