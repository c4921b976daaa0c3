"""Advice from the figures of the last steps: learning, the stage that bounds a run, what would help, and the clip.

It changes nothing. Its predictions follow from the measured times alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gspo.common.config.schema import Config
from gspo.common.telemetry.clip_causes import clip_causes, clip_causes_line
from gspo.common.telemetry.learning import ends, has_signal, learning_findings
from gspo.common.telemetry.step_time import Share, seconds_by_function, shares

# A step may be odd; older ones may be of another configuration.
STEPS_LOOKED_AT = 5
# If generation and training overlap, a learner that waits longer than this share of its time is bound by others.
WAITS = 0.1
# A saving below this share of a step is not worth a sentence.
WORTH_IT = 0.05
# Above this share most of the signal of the reward is lost. A toy run with lag 1 went from 0.16 to 0.48 and gained half
# as much.
CLIPPED_TOO_MUCH = 0.4
CLIPPED_STEPS = 10
NEVER_CLIPPED_STEPS = 20
# Share of sequences that would leave the clip at an unchanged policy: worth a sentence, and most of the clipped share.
NOISE_NOTICED, NOISE_TOO_MUCH = 0.05, 0.33
# Geometric mean of the weights of a product. Half of the answers are below it where the logarithms are symmetric.
WEIGHED_DOWN = 0.5
# Over TURN_STEPS steps, turns of conversations that are so much shorter and so many more. Elsewhere, dividing by an
# answer's own tokens made turns 80 % shorter and 56 % more, without gain.
TURN_STEPS = 20
TURNS_SHORTER, TURNS_MORE = 0.8, 1.1
# A replay must make the same bits, so no resume takes them.
_FIXED = "Keys of algorithm are fixed for a run: change them in a new one, with model.path at this run's export/"


@dataclass(frozen=True)
class Verdict:
    """The stage that bounds the run.

    Attributes:
        steps: Number of steps looked at, up to the newest.
        seconds: Mean time of one of them.
        shares: Parts of that time by cause, the largest first.
        stage: generation, reward, training, push, evaluation, checkpoint, log, issue or intake.
        because: The numbers behind it, in a sentence.
        change: Changes that would help, the most promising first; empty while the rewards teach nothing.
    """

    steps: int
    seconds: float
    shares: tuple[Share, ...]
    stage: str
    because: str
    change: tuple[str, ...]


def verdict(figures: Sequence[Mapping[str, float]], config: Config, num_generators: int) -> Verdict | None:
    """The verdict on the last STEPS_LOOKED_AT steps, given their figures, oldest first; None before the first step."""
    steps = figures[-STEPS_LOOKED_AT:]
    step_shares = shares(*steps)
    if not step_shares:
        return None
    times = Times(steps, step_shares, config, num_generators)
    stage = _stage(times)
    because, changes = _explain(stage, times)
    if not has_signal(figures, config):
        changes = []
    return Verdict(
        steps=len(steps),
        seconds=times.step_s,
        shares=tuple(Share(s.cause, s.seconds / len(steps), s.share) for s in step_shares),
        stage=stage,
        because=because,
        change=tuple(changes),
    )


class Times:
    """Mean seconds of a step, and what they are compared with."""

    def __init__(
        self, steps: Sequence[Mapping[str, float]], step_shares: Sequence[Share], config: Config, num_generators: int
    ) -> None:
        self.steps, self.config, self.num_generators = steps, config, max(1, num_generators)
        self.by_cause = {share.cause: share.seconds / len(steps) for share in step_shares}
        self.step_s = sum(self.by_cause.values())
        self.overlaps = config.staleness.max_lag > 0

    def seconds_of(self, *causes: str) -> float:
        """Seconds of a step by some causes."""
        return sum(self.by_cause.get(cause, 0.0) for cause in causes)

    @property
    def generation_s(self) -> float:
        """Time the learner waits for rollouts: for a generator to be free, and for answers to end."""
        return self.seconds_of("queue", "generation")

    @property
    def busy_s(self) -> float:
        """Time in which the learner waits for no other service."""
        return self.seconds_of("training", "log", "checkpoint", "push", "shift")

    def saves(self, seconds: float) -> str:
        """'about 1.5 s of 4.0 s a step'."""
        return f"about {seconds:.2g} s of {self.step_s:.2g} s a step"


def _stage(times: Times) -> str:
    """The stage that a step lasts as long as.

    Without a lag the stages follow one another, and the longest one bounds. With a lag they overlap: the stage that
    the learner waits for is the slowest, even if training takes longer.
    """
    waited = {
        "generation": times.generation_s,
        "reward": times.seconds_of("reward"),
        "evaluation": times.seconds_of("evaluation"),
    }
    stages = ("training", "shift", "push", "checkpoint", "log", "issue", "intake")
    others = {stage: times.seconds_of(stage) for stage in stages}
    if times.overlaps and max(waited.values()) > WAITS * times.step_s:
        return max(waited, key=lambda stage: waited[stage])
    if times.overlaps:
        waited = {}
    everything = {**waited, **others}
    return max(everything, key=lambda stage: everything[stage])


def _explain(stage: str, times: Times) -> tuple[str, list[str]]:
    """The numbers behind the stage, in a sentence, and the changes that would help, the most promising first."""
    config, lag = times.config, _lag(times)
    seconds = times.generation_s if stage == "generation" else times.seconds_of(stage)
    share = f"{seconds:.2g} s of {times.step_s:.2g} s ({seconds / times.step_s:.0%})"
    match stage:
        case "generation":
            because = (
                f"the learner waits {share} of a step for rollouts, {times.seconds_of('queue'):.2g} s of it until a "
                f"generator is free, with {times.num_generators} of them"
            )
            return because, [*lag, *_faster_generation(times)]
        case "reward":
            name, slowest_s = next(iter(seconds_by_function(*times.steps).items()), ("", 0.0))
            by_function = f", {slowest_s / len(times.steps):.2g} s of it for {name}" if name else ""
            more = (
                f"more calls at a time (reward.workers above {config.reward.workers}, or another reward service), "
                f"where cores are free, and batches below reward.batch_size {config.reward.batch_size}"
            )
            faster = f"a faster {name or 'reward function'}: up to {times.saves(seconds)} less"
            return f"the learner waits {share} of a step for rewards{by_function}", [faster, more, *lag]
        case "training":
            waited_s = times.generation_s + times.seconds_of("reward")
            bfloat16 = "learner.dtype: bfloat16 where the processor has it, "
            quicker = "" if config.learner.dtype == "bfloat16" else bfloat16
            means = f"{quicker}learner.ranks above {config.learner.ranks}, or a GPU"
            because = (
                f"training takes {share} of a step, and the learner waits {waited_s:.2g} s for rollouts and rewards"
            )
            return because, [*lag, f"a faster learner: {means}; another generator would change nothing"]
        case "shift":
            larger = f"larger steps (algorithm.rollout_batch_size above {config.algorithm.rollout_batch_size})"
            return f"handing shared GPUs over takes {share} of a step", [larger, "placement: split", *lag]
        case "push":
            change = "a faster network to the generators, or generators nearer to the learner"
            return f"making and pushing the version takes {share} of a step", [*lag, change]
        case "evaluation":
            fewer = f"fewer evaluations (evaluation.every above {config.evaluation.every}) or fewer prompts in them"
            mixed = "evaluation.hold_weights: false, with figures of mixed versions"
            changes = [fewer, mixed] if config.evaluation.hold_weights else [fewer]
            return f"the learner waits {share} of a step for evaluations", changes
        case "checkpoint":
            every = config.run.checkpoint_every
            fewer = f"run.checkpoint_every: {2 * every} instead of {every}: {times.saves(seconds / 2)} less"
            return f"checkpoints take {share} of a step", [fewer]
        case "log":
            return f"writing the log takes {share} of a step", ["a faster disk for the run directory"]
        case "issue":
            change = "to find what the coordinator waits for: an evaluation before training, or a pause"
            return f"the learner waits {share} of a step for groups that are not issued yet", [change]
    change = "a Redis nearer to the learner, or with fewer others on it"
    return f"the learner waits {share} of a step for scored rollouts to come in", [change]


def _lag(times: Times) -> list[str]:
    """The time that an overlap of generation and reward with training would save, if they do not overlap."""
    waited_s = times.generation_s + times.seconds_of("reward")
    saved_s = min(waited_s, times.busy_s)
    if times.overlaps or saved_s < WORTH_IT * times.step_s:
        return []
    split = "placement: split and " if times.config.placement == "shared" else ""
    overlap = f"{split}staleness.max_lag: 1 instead of 0, so that generation and training overlap"
    return [f"{overlap}: {times.saves(saved_s)} less"]


def _faster_generation(times: Times) -> list[str]:
    num, waited_s, sampling_s = times.num_generators, times.generation_s, times.seconds_of("generation")
    saved_s = min(waited_s, times.step_s / (num + 1)) if times.overlaps else waited_s / (num + 1)
    more_generators = (
        f"one more generator (generation.replicas: {num + 1}), with cores or a GPU of its own: up to "
        f"{times.saves(saved_s)} less"
    )
    tail = (
        f"a shorter algorithm.response_length, a faster engine, or staleness.max_lag above "
        f"{times.config.staleness.max_lag}: the learner waits {sampling_s:.2g} s of a step for the last answer alone"
    )
    return [more_generators, tail] if times.seconds_of("queue") >= sampling_s / 2 else [tail, more_generators]


def advice(figures: Sequence[Mapping[str, float]], config: Config) -> dict[str, str]:
    """Sentences by name for the newest step, given the figures of the steps up to it, oldest first."""
    is_used = not config.teacher.trains_by_loss_alone  # then no clip changes a loss
    takes_signal = is_used and config.algorithm.objective != "cispo"  # its clip bounds weights
    sentences: dict[str, str | None] = {
        **learning_findings(figures, config),
        "clipped_too_much": _clipped(figures, config) if takes_signal else None,
        "clip_is_silent": _never(figures, config) if takes_signal else None,
        "clip_is_noise": _noise(figures, config) if is_used else None,
        "answers_weighed_down": _weighed_down(figures, config),
        "turns_shrink": _shrinking_turns(figures, config),
        "batch_is_small": _small(figures, config),
    }
    return {name: text for name, text in sentences.items() if text}


def _clipped(figures: Sequence[Mapping[str, float]], config: Config) -> str | None:
    unit = _unit(config)
    shares = _last(figures, f"clipped_{unit}", CLIPPED_STEPS)
    if not shares or min(shares) <= CLIPPED_TOO_MUCH:
        return None
    causes, line = clip_causes(figures), clip_causes_line(figures, config)
    remedies = {"movement": "a wider clip (algorithm.pg_clip_low, pg_clip_high)"}
    if config.algorithm.old_logprobs == "inference" and not config.algorithm.bounds_divergence:
        remedies["noise"] = "algorithm.old_logprobs: recompute"
    if config.staleness.max_lag > 0:
        remedies["lag"] = f"staleness.max_lag below {config.staleness.max_lag}"
    # The remedy of the largest cause first.
    first = causes.largest if causes else ""
    ordered = sorted(remedies, key=lambda cause: cause != first)
    return (
        f"clip: {shares[-1]:.0%} of {unit} are clipped, over {CLIPPED_TOO_MUCH:.0%} for {CLIPPED_STEPS} steps; "
        f"most of the signal is lost. {line + '. ' if line else ''}"
        f"Try {' or '.join(remedies[cause] for cause in ordered)}. {_FIXED}"
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
    if not shares or shares[0] <= NOISE_NOTICED or config.algorithm.old_logprobs == "recompute":
        return None
    clips = _last(figures, "noise_clip", 1)
    wider = (
        f"a wider clip: at {clips[0]:.2g} on both sides, noise puts at most 1 % outside" if clips else "a wider clip"
    )
    remedies = ["algorithm.old_logprobs: recompute", wider]
    if config.generation.dtype != "float32":
        remedies.insert(0, "generation.dtype: float32, which a resume takes")
    return (
        f"clip: the engines' numerical mismatch alone puts {shares[0]:.0%} of {_unit(config)} outside the clip"
        f"{', so clipping is noise' if shares[0] > NOISE_TOO_MUCH else ''}. Try {', or '.join(remedies)}. {_FIXED}"
    )


def _weighed_down(figures: Sequence[Mapping[str, float]], config: Config) -> str | None:
    weights = _last(figures, "behavior_weight_geomean", STEPS_LOOKED_AT)
    if config.algorithm.behavior_level != "product" or not weights or max(weights) >= WEIGHED_DOWN:
        return None
    return (
        f"correction: the geometric mean of the weights is {weights[-1]:.2g} before their bounds, below "
        f"{WEIGHED_DOWN:g} for {STEPS_LOOKED_AT} steps. The product over an answer's tokens falls with its length. Try "
        f"algorithm.behavior_level: sequence, or a smaller staleness.max_lag. {_FIXED}"
    )


def _shrinking_turns(figures: Sequence[Mapping[str, float]], config: Config) -> str | None:
    """Whether turns got shorter and more at once, by means of the first and the last quarter of TURN_STEPS steps."""
    tokens, turns = (_last(figures, name, TURN_STEPS) for name in ("turn_tokens_mean", "turns_mean"))
    if not tokens or not turns:
        return None
    pairs = ends(tokens, 4), ends(turns, 4)
    shorter, more = (last / max(first, 1e-9) for first, last in pairs)
    if shorter > TURNS_SHORTER or more < TURNS_MORE:
        return None
    other = "" if config.algorithm.loss_agg_mode == "seq-mean-turn-mean" else ", or loss_agg_mode: seq-mean-turn-mean"
    return (
        f"turns: within {TURN_STEPS} steps a turn's tokens fell to {shorter:.0%} and turns rose to {more:.0%}. If the "
        f"reward does not rise with them, the objective pays for short turns. Try a reward that counts turns{other}. "
        f"{_FIXED}"
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
