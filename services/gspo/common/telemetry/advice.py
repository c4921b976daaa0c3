"""Two verdicts from the figures of the last steps: findings on learning, and the stage that bounds the time.

It changes nothing. Predictions follow from the measured times alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gspo.common.config.evaluation import OwnRule
from gspo.common.config.schema import Config
from gspo.common.telemetry.clip_rules import CLIP_RULES
from gspo.common.telemetry.figure_names import MEASURED_FIGURES
from gspo.common.telemetry.findings import Finding, Rule, Said, Steps, apply_rules, findings_of_run
from gspo.common.telemetry.learning_rules import LEARNING_RULES, has_signal
from gspo.common.telemetry.step_time import Share, seconds_by_function, shares

# A step may be odd; older ones may be of another configuration.
STEPS_LOOKED_AT = 5
# If generation and training overlap, a learner that waits longer than this share of its time is bound by others.
WAITS = 0.1
# A saving below this share of a step is not worth a sentence.
WORTH_IT = 0.05


RULES = (*LEARNING_RULES, *CLIP_RULES)


def rules_of(config: Config) -> tuple[Rule, ...]:
    """All rules of a run, those on learning first and the user's own last."""
    return (*RULES, *map(_own_rule, config.rules.own))


def _own_rule(own: OwnRule) -> Rule:
    def holds(steps: Steps, _config: Config) -> bool:
        values = [step[own.figure] for step in steps[-own.steps :]]
        if own.above is not None:
            return min(values) > own.above
        return own.below is not None and max(values) < own.below

    def says(steps: Steps, _config: Config) -> Said:
        return Said(f"{own.text.rstrip('.')} ({own.figure} is {steps[-1][own.figure]:.3g})", tries=own.tries)

    is_measured = own.figure in MEASURED_FIGURES
    return Rule(f"own_{own.name}", (own.figure,), own.steps, holds, says, is_measured=is_measured)


def findings(steps: Steps, config: Config) -> dict[str, Finding]:
    """The findings at the newest step by their rules, those on learning first; the steps are oldest first."""
    return apply_rules(rules_of(config), steps, config)


def all_findings(steps: Steps, config: Config) -> list[tuple[Finding, list[int]]]:
    """Each finding that a run had, in its newest form, with the steps that had it."""
    return findings_of_run(rules_of(config), steps, config)


@dataclass(frozen=True)
class Verdict:
    """The stage that bounds the run.

    Attributes:
        steps: Number of steps looked at, up to the newest.
        seconds: Mean time of one of them.
        shares: Parts of that time by cause, the largest first.
        stage: generation, agents, reward, training, push, evaluation, checkpoint, log, issue or intake.
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
    def sampling_stage(self) -> str:
        """The stage that samples rollouts: agents play them in some runs."""
        return "agents" if self.config.agent.used else "generation"

    @property
    def busy_s(self) -> float:
        """Time in which the learner waits for no other service."""
        return self.seconds_of("training", "log", "checkpoint", "push", "shift")

    def saves(self, seconds: float) -> str:
        """'about 1.5 s of 4.0 s a step'."""
        return f"about {seconds:.2g} s of {self.step_s:.2g} s a step"


def _waited(times: Times) -> dict[str, float]:
    """Seconds of a step in which the learner waits for a stage that may run beside training."""
    return {
        times.sampling_stage: times.generation_s,
        "reward": times.seconds_of("reward"),
        "evaluation": times.seconds_of("evaluation"),
    }


def _stage(times: Times) -> str:
    """The stage with the largest share of a step."""
    stages = ("training", "shift", "push", "checkpoint", "log", "issue", "intake")
    everything = {**_waited(times), **{stage: times.seconds_of(stage) for stage in stages}}
    return max(everything, key=lambda stage: everything[stage])


def _explain(stage: str, times: Times) -> tuple[str, list[str]]:
    """The numbers behind the stage, in a sentence, and the changes that would help, the most promising first."""
    config, lag = times.config, _lag(times)
    seconds = _waited(times).get(stage, times.seconds_of(stage))
    share = f"{seconds:.2g} s of {times.step_s:.2g} s ({seconds / times.step_s:.0%})"
    match stage:
        case "generation":
            because = (
                f"the learner waits {share} of a step for rollouts, {times.seconds_of('queue'):.2g} s of it until a "
                f"generator is free, with {times.num_generators} of them"
            )
            return because, [*lag, *_faster_generation(times)]
        case "agents":
            return f"the learner waits {share} of a step for agents{_played(times)}", [*lag, *_faster_agents(times)]
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
            return _explain_training(times, share)
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


def _explain_training(times: Times, share: str) -> tuple[str, list[str]]:
    learner, waited = times.config.learner, _waited(times)
    bfloat16 = "" if learner.dtype == "bfloat16" else "learner.dtype: bfloat16 where the processor has it, "
    means = f"{bfloat16}learner.ranks above {learner.ranks}, or a GPU"
    longest = max(waited, key=lambda stage: waited[stage])
    if times.overlaps and waited[longest] > WAITS * times.step_s:
        # The stage beside training takes even longer: a faster learner alone would wait for it.
        wait = f"{waited[longest]:.2g} s ({waited[longest] / times.step_s:.0%})"
        because = f"training takes {share} of a step; of the rest, the learner waits {wait} for {longest}"
        return because, [*_explain(longest, times)[1], f"then a faster learner: {means}"]
    waited_s = times.generation_s + times.seconds_of("reward")
    because = f"training takes {share} of a step, and the learner waits {waited_s:.2g} s for rollouts and rewards"
    return because, [*_lag(times), f"a faster learner: {means}; another generator would change nothing"]


def _lag(times: Times) -> list[str]:
    """The time that an overlap of generation and reward with training would save, if they do not overlap."""
    waited_s = times.generation_s + times.seconds_of("reward")
    saved_s = min(waited_s, times.busy_s)
    if times.overlaps or saved_s < WORTH_IT * times.step_s:
        return []
    split = "placement: split and " if times.config.placement == "shared" else ""
    overlap = f"{split}staleness.max_lag: 1 instead of 0, so that generation and training overlap"
    return [f"{overlap}: {times.saves(saved_s)} less"]


def _played(times: Times) -> str:
    """The rollouts that the agents play at a time, and the part of the wait that is for a worker."""
    agent = times.config.agent
    at_once = [step["rollouts_at_once"] for step in times.steps if "rollouts_at_once" in step]
    workers = f" with agent.workers {agent.workers}" if agent.is_started else ""
    played = f": {fmean(at_once):.1f} rollouts are played at a time{workers}" if at_once else ""
    return f", {times.seconds_of('queue'):.2g} s of it until a worker is free{played}"


def _faster_agents(times: Times) -> list[str]:
    agent = times.config.agent
    if agent.is_started:
        more = f"agent.workers above {agent.workers}, as long as the machine has idle cores and the engine idles"
    else:
        more = (
            f"more workers of yours at the gateway, which hands out agent.max_rollouts {agent.max_rollouts} at a time"
        )
    cheaper = "cores for the agents, or less work of an agent: lighter imports, fewer calls"
    engine = "a faster engine, if the generators are busy all the time"
    is_queued = times.seconds_of("queue") >= times.seconds_of("generation") / 2
    return [more, cheaper, engine] if is_queued else [cheaper, more, engine]


def _faster_generation(times: Times) -> list[str]:
    num, waited_s, sampling_s = times.num_generators, times.generation_s, times.seconds_of("generation")
    saved_s = min(waited_s, times.step_s / (num + 1)) if times.overlaps else waited_s / (num + 1)
    more_generators = (
        f"one more generator (generation.replicas: {num + 1}), with cores or a GPU of its own: up to "
        f"{times.saves(saved_s)} less"
    )
    shorter = "a shorter algorithm.response_length, " if _are_long(times) else ""
    environment = "a faster environment, " if times.config.environment.used else ""
    tail = (
        f"{shorter}{environment}a faster engine, or staleness.max_lag above {times.config.staleness.max_lag}: the "
        f"learner waits {sampling_s:.2g} s of a step for the last answer alone"
    )
    return [more_generators, tail] if times.seconds_of("queue") >= sampling_s / 2 else [tail, more_generators]


def _are_long(times: Times) -> bool:
    """Whether the limit on answers may matter: some are cut off, or their mean is above half of it."""
    newest = times.steps[-1]
    mean = newest.get("response_tokens_mean", math.inf)
    return newest.get("truncated_share", 0.0) > 0 or mean >= times.config.algorithm.response_length / 2
