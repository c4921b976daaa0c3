"""Advice from the figures of the last steps: the stage that bounds a run, the changes that would help, and the clip.

It changes nothing. Its predictions follow from the measured times alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gspo.common.config.schema import Config
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
# Above this more than a third of the sequences would leave the clip at an unchanged policy.
NOISE_TOO_MUCH = 0.33
# A replay must make the same bits, so no resume takes them.
_FIXED = "Keys of algorithm are fixed for a run: change them in a new one, with model.path at this run's export/"


@dataclass(frozen=True)
class Verdict:
    """The stage that bounds the run.

    Attributes:
        steps: Number of steps looked at, up to the newest.
        seconds: Mean time of one of them.
        shares: Of that time by cause, the largest first.
        stage: generation, reward, training, push, evaluation, checkpoint, log, issue or intake.
        because: The numbers behind it, in a sentence.
        change: Changes that would help, the most promising first; may be empty.
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
    return Verdict(
        steps=len(steps),
        seconds=times.step_s,
        shares=tuple(Share(s.cause, s.seconds / len(steps), s.share) for s in step_shares),
        stage=stage,
        because=_because(stage, times),
        change=tuple(_CHANGES[stage](times)),
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
        return self.seconds_of("training", "log", "checkpoint", "push")

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
    others = {stage: times.seconds_of(stage) for stage in ("training", "push", "checkpoint", "log", "issue", "intake")}
    if times.overlaps and max(waited.values()) > WAITS * times.step_s:
        return max(waited, key=lambda stage: waited[stage])
    if times.overlaps:
        waited = {}
    everything = {**waited, **others}
    return max(everything, key=lambda stage: everything[stage])


def _because(stage: str, times: Times) -> str:
    seconds = times.generation_s if stage == "generation" else times.seconds_of(stage)
    share = f"{seconds:.2g} s of {times.step_s:.2g} s ({seconds / times.step_s:.0%})"
    queue_s = times.seconds_of("queue")
    sentences = {
        "generation": f"the learner waits {share} of a step for rollouts, {queue_s:.2g} s of it until a "
        f"generator is free, with {times.num_generators} of them",
        "reward": f"the learner waits {share} of a step for rewards{_slowest(times)}",
        "training": f"training takes {share} of a step, and the learner waits "
        f"{times.generation_s + times.seconds_of('reward'):.2g} s for rollouts and rewards",
        "push": f"publishing and pushing the weights takes {share} of a step",
        "evaluation": f"the learner waits {share} of a step for evaluations",
        "checkpoint": f"checkpoints take {share} of a step",
        "log": f"writing the log takes {share} of a step",
        "issue": f"the learner waits {share} of a step for groups that are not issued yet",
        "intake": f"the learner waits {share} of a step for scored rollouts to come in",
    }
    return sentences[stage]


def _slowest(times: Times) -> str:
    functions = seconds_by_function(*times.steps)
    if not functions:
        return ""
    name, seconds = next(iter(functions.items()))
    return f", {seconds / len(times.steps):.2g} s of it for {name}"


def _lag(times: Times) -> list[str]:
    """The time that an overlap of generation and reward with training would save, if they do not overlap."""
    waited_s = times.generation_s + times.seconds_of("reward")
    saved_s = min(waited_s, times.busy_s)
    if times.overlaps or saved_s < WORTH_IT * times.step_s:
        return []
    return [f"staleness.max_lag: 1 instead of 0, so that generation and training overlap: {times.saves(saved_s)} less"]


def _generation(times: Times) -> list[str]:
    num, waited_s = times.num_generators, times.generation_s
    queue_s = times.seconds_of("queue")
    saved_s = min(waited_s, times.step_s / (num + 1)) if times.overlaps else waited_s / (num + 1)
    more_generators = (
        f"one more generator (generation.replicas: {num + 1}), with cores or a GPU of its own: up to "
        f"{times.saves(saved_s)} less"
    )
    lag = times.config.staleness.max_lag
    tail = (
        f"a shorter algorithm.response_length, a faster engine, or staleness.max_lag above {lag}: the learner waits "
        f"{times.seconds_of('generation'):.2g} s of a step for the last answer alone"
    )
    changes = [more_generators, tail] if queue_s >= times.seconds_of("generation") / 2 else [tail, more_generators]
    return [*_lag(times), *changes]


def _reward(times: Times) -> list[str]:
    name = next(iter(seconds_by_function(*times.steps)), "")
    workers = times.config.reward.workers
    faster = f"a faster {name or 'reward function'}: up to {times.saves(times.seconds_of('reward'))} less"
    more = (
        f"more calls at a time (reward.workers above {workers}, or another reward service), where cores are free, "
        f"and batches below reward.batch_size {times.config.reward.batch_size}"
    )
    return [faster, more, *_lag(times)]


def _training(times: Times) -> list[str]:
    learner = times.config.learner
    quicker = [] if learner.dtype == "bfloat16" else ["learner.dtype: bfloat16"]
    means = ", ".join([*quicker, f"learner.ranks above {learner.ranks}", "or a GPU"])
    return [*_lag(times), f"a faster learner: {means}; another generator would change nothing"]


def _push(times: Times) -> list[str]:
    return [*_lag(times), "a faster network to the generators, or generators nearer to the learner"]


def _evaluation(times: Times) -> list[str]:
    evaluation = times.config.evaluation
    mixed = ["evaluation.hold_weights: false, with figures of mixed versions"] if evaluation.hold_weights else []
    return [f"fewer evaluations (evaluation.every above {evaluation.every}) or fewer prompts in them", *mixed]


def _checkpoint(times: Times) -> list[str]:
    every = times.config.run.checkpoint_every
    return [
        f"run.checkpoint_every: {2 * every} instead of {every}: {times.saves(times.seconds_of('checkpoint') / 2)} less"
    ]


_CHANGES: dict[str, Callable[[Times], list[str]]] = {
    "generation": _generation,
    "reward": _reward,
    "training": _training,
    "push": _push,
    "evaluation": _evaluation,
    "checkpoint": _checkpoint,
    "log": lambda _: ["a faster disk for the run directory"],
    "issue": lambda _: ["to find what the coordinator waits for: an evaluation before training, or a pause"],
    "intake": lambda _: ["a Redis nearer to the learner, or with fewer others on it"],
}


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
