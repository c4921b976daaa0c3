"""Advice for the user from the figures of the last steps. It changes nothing, neither a clip nor a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gspo.common.config.schema import Config

# Above this share most of the signal of the reward is lost. A toy run with lag 1 went from 0.16 to 0.48 and gained half
# as much.
CLIPPED_TOO_MUCH = 0.4
CLIPPED_STEPS = 10
NEVER_CLIPPED_STEPS = 20
# Above this more than a third of the sequences would leave the clip at an unchanged policy.
NOISE_TOO_MUCH = 0.33
# A replay must make the same bits, so no resume takes them.
_FIXED = "Keys of algorithm are fixed for a run: change them in a new one, with model.path at this run's export/"


def advice(figures: Sequence[Mapping[str, float]], config: Config) -> dict[str, str]:
    """Sentences by name for the newest step, given the figures of the steps up to it, oldest first."""
    sentences = {
        "clipped_too_much": _clipped(figures, config),
        "clip_is_silent": _never(figures, config),
        "clip_is_noise": _noise(figures, config),
        "batch_is_small": _small(figures, config),
    }
    return {name: text for name, text in sentences.items() if text}


def _clipped(figures: Sequence[Mapping[str, float]], config: Config) -> str | None:
    unit = _unit(config)
    shares = _last(figures, f"clipped_{unit}", CLIPPED_STEPS)
    if not shares or min(shares) <= CLIPPED_TOO_MUCH:
        return None
    remedies = ["a wider clip (algorithm.pg_clip_low, pg_clip_high)"]
    if config.algorithm.old_logprobs == "inference":
        remedies.append("algorithm.old_logprobs: recompute")
    if config.staleness.max_lag > 0:
        remedies.append(f"staleness.max_lag below {config.staleness.max_lag}")
    return (
        f"clip: {shares[-1]:.0%} of {unit} are clipped, over {CLIPPED_TOO_MUCH:.0%} for {CLIPPED_STEPS} steps; "
        f"most of the signal is lost. Try {' or '.join(remedies)}. {_FIXED}"
    )


def _never(figures: Sequence[Mapping[str, float]], config: Config) -> str | None:
    unit = _unit(config)
    shares = _last(figures, f"clipped_{unit}", NEVER_CLIPPED_STEPS)
    if not shares or max(shares) > 0:
        return None
    low, high = config.algorithm.clip
    return (
        f"clip: none of the {unit} was clipped in {NEVER_CLIPPED_STEPS} steps at {low:g}/{high:g}; "
        f"the objective is not bounded. Narrow algorithm.pg_clip_low and pg_clip_high if that is not meant. {_FIXED}"
    )


def _noise(figures: Sequence[Mapping[str, float]], config: Config) -> str | None:
    shares = _last(figures, "noise_share", 1)
    if not shares or shares[0] <= NOISE_TOO_MUCH or config.algorithm.old_logprobs == "recompute":
        return None
    remedies = ["algorithm.old_logprobs: recompute", "a wider clip"]
    if config.generation.dtype != "float32":
        remedies.insert(0, "generation.dtype: float32, which a resume takes")
    return (
        f"clip: the engines' numerical mismatch alone puts {shares[0]:.0%} of {_unit(config)} outside the clip, so "
        f"clipping is noise. Try {', or '.join(remedies)}. {_FIXED}"
    )


def _small(figures: Sequence[Mapping[str, float]], config: Config) -> str | None:
    newest, algorithm = figures[-1], config.algorithm
    dropped = newest.get("groups_filtered", 0.0) + newest.get("groups_failed", 0.0)
    trained = newest.get("groups", 0.0)
    if trained >= algorithm.rollout_batch_size or dropped < algorithm.max_refill * algorithm.rollout_batch_size:
        return None
    return (
        f"batch: {trained:.0f} of {algorithm.rollout_batch_size} groups were trained, since {dropped:.0f} were "
        f"filtered or failed meanwhile, as many as algorithm.max_refill {algorithm.max_refill} allows. Choose prompts "
        f"that the policy sometimes answers right, or raise algorithm.max_refill. {_FIXED}"
    )


def _unit(config: Config) -> str:
    """The unit of the clip: the ratio is a token's under `token`, a sequence's otherwise."""
    return "tokens" if config.algorithm.importance_sampling == "token" else "sequences"


def _last(figures: Sequence[Mapping[str, float]], name: str, num: int) -> list[float]:
    """The last `num` values of a figure, empty where a step lacks it."""
    values = [step[name] for step in figures[-num:] if name in step]
    return values if len(values) == num else []
