"""Findings from a few answers of a model, before it is trained on them: whether they could teach something."""

from collections.abc import Mapping
from dataclasses import replace

from gspo.common.config.schema import Config
from gspo.common.telemetry.findings import Finding
from gspo.common.telemetry.learning_rules import LEARNING_RULES
from gspo.common.telemetry.source_figures import figures_of, named_sources
from gspo_proto.rollout_pb2 import ScoresDiffer

FIRST_ANSWERS = "first_answers"
_NO_SIGNAL, _CUT_OFF = "no_signal", "cut_off"
_JUDGED = (_NO_SIGNAL, "weak_signal", _CUT_OFF)


def sample_findings(figures: Mapping[str, float], config: Config) -> dict[str, Finding]:
    """Findings from the figures of a few answers alone.

    An absent signal names answers that are cut off among its causes, so it stands alone.
    """
    sampled, rules = (figures,), [rule for rule in LEARNING_RULES if rule.name in _JUDGED]
    judged = [rule for rule in rules if rule.applies(config) and rule.has_figures(figures)]
    findings = {rule.name: rule.finding(sampled, config) for rule in judged if rule.holds(sampled, config)}
    if _NO_SIGNAL in findings:
        findings.pop(_CUT_OFF, None)
    return findings


def first_answers(figures: Mapping[str, float], config: Config) -> list[Finding]:
    """Findings of step 1, whose answers are the model's before any update: all of them, then those of each source.

    Groups that were filtered since their rewards are equal count as groups with equal rewards.
    """
    trained, filtered = figures.get("groups", 0.0), figures.get("groups_filtered", 0.0)
    equal = figures.get("zero_spread_groups")
    if equal is None or not trained:
        return []
    everything = {**figures, "zero_spread_groups": (equal * trained + filtered) / (trained + filtered)}
    findings = _named(everything, config, "")
    if (names := named_sources([figures])) and len(names) > 1 and not findings:
        findings = [
            finding for name in names for finding in _named(figures_of(name, figures), config, f" of source {name}")
        ]
    return findings


def scores_finding(differ: ScoresDiffer) -> Finding:
    """The finding of a scorer that scored the first answers twice."""
    return Finding(
        "scores_differ",
        f"{differ.num_differing} of {differ.num_answers} answers got another value of {differ.function} when they were "
        f"scored again, in the reverse order: {differ.first:.3g}, then {differ.again:.3g}",
        (
            "it keeps something from one call to the next, or looks at the other answers of a call",
            "it uses random numbers or the time",
            "a judge behind it samples",
        ),
        ("a value that follows from prompt, answer and columns alone", "a judge at temperature 0"),
    )


def _named(figures: Mapping[str, float], config: Config, of_source: str) -> list[Finding]:
    about = (
        f"the {figures['groups']:.0f} groups{of_source} before the first update (reward {figures['reward_mean']:.3g}, "
        f"{figures['response_tokens_mean']:.1f} tokens an answer of at most {config.algorithm.response_length})"
    )
    return [
        replace(finding, rule=FIRST_ANSWERS, seen=f"{about}: {finding.seen}")
        for finding in sample_findings(figures, config).values()
    ]
