"""`gspo doctor --sample`: a few answers of the model to training prompts, scored: can it learn from them?"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from gspo.cli.findings import DoctorFinding
from gspo.cli.run.evaluation import EvaluationSpec, measure
from gspo.common.config.schema import Config
from gspo.common.telemetry.first_answers import sample_findings

# To each source. A group of a run has as many answers as the run says, and this is a look, no measurement.
_PROMPTS, _ANSWERS = 4, 4


def sample(config_file: Path, config: Config, console: Console) -> Iterator[DoctorFinding]:
    """Sample and score answers to the first prompts of each source, with the engine and the reward of the run.

    Raises:
        InputError: The configuration cannot sample without the run, as with agents that a user starts.
        RunError: There was no answer with a score.
    """
    for source in config.sources:
        spec = EvaluationSpec(
            config.model.path,
            tuple(source.prompts[:1]),
            config_file,
            num_answers=_ANSWERS,
            limit=_PROMPTS,
            source=source.name or None,
        )
        figures = next(iter(measure(spec, plain=True, console=console).values()))
        name = f"sample of {source.name}" if source.name else "sample"
        text = _in_words(figures, config)
        is_one_reward = figures.get("zero_spread_groups") == 1 and not figures.get("sampled_stderr")
        bounds = dict.fromkeys(("reward_min", "reward_max"), figures["sampled_mean"]) if is_one_reward else {}
        seen = sample_findings({**figures, **bounds, "reward_mean": figures["sampled_mean"]}, config).values()
        advice = "\n".join(finding.text for finding in seen)
        yield DoctorFinding(name, "warning" if seen else "OK", text, advice)


def _in_words(figures: Mapping[str, float], config: Config) -> str:
    length = config.algorithm.response_length
    parts = [
        f"{figures['num_prompts']:.0f} prompts with {figures['num_answers']:.0f} answers each",
        f"reward {figures['sampled_mean']:.3g} \u00b1 {figures.get('sampled_stderr', 0.0):.2g}",
        f"{figures['response_tokens_mean']:.1f} tokens an answer of at most {length}",
    ]
    if "zero_spread_groups" in figures:
        parts.append(f"{1 - figures['zero_spread_groups']:.0%} of the prompts with different rewards")
    if not figures.get("turns_mean"):
        parts.append(f"{figures['eos_share']:.0%} of the answers with an end token")
    return ", ".join(parts)
