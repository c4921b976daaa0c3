"""Names of the figures of a step by source of prompts: `source_NAME/FIGURE`."""

from collections.abc import Iterable, Mapping

# Trained groups, and of their rollouts the mean reward, the share of groups whose rewards are all equal, the lengths.
SOURCE_FIGURES = ("groups", "reward_mean", "zero_spread_groups", "response_tokens_mean")
PREFIX = "source_"


def source_figure(source: str, figure: str) -> str:
    """The name of a source's figure in a step's record."""
    return f"{PREFIX}{source}/{figure}"


def named_sources(steps: Iterable[Mapping[str, float]]) -> list[str]:
    """The sources that the figures of some steps name."""
    names = (name.removeprefix(PREFIX) for figures in steps for name in figures if name.startswith(PREFIX))
    return list(dict.fromkeys(name.rpartition("/")[0] for name in names))


def figures_of(source: str, figures: Mapping[str, float]) -> dict[str, float]:
    """A source's figures of a step, without those that it lacks."""
    return {name: figures[key] for name in SOURCE_FIGURES if (key := source_figure(source, name)) in figures}
