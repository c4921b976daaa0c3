"""`gspo config`: prints the keys of a configuration with type, default, bounds and meaning, as a list or Markdown."""

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gspo.common.config.reference import Key, explain, item_keys
from gspo.common.errors import InputError, nearest

# A run needs no others to be one's own. The configuration has them in this order.
STARTING_KEYS = (
    *("model.path", "data.prompts", "data.answer_column", "reward.functions", "evaluation.prompts", "evaluation.every"),
    *("run.total_steps", "algorithm.preset", "algorithm.rollout_batch_size"),
    *("algorithm.num_return_sequences_in_group", "algorithm.num_mini_batches", "algorithm.prompt_length"),
    *("algorithm.response_length", "sampling.temperature", "learner.learning_rate", "learner.lora.rank"),
    *("learner.micro_batch_tokens", "generation.replicas", "staleness.max_lag", "run.checkpoint_every"),
)


def select_keys(prefix: str) -> list[Key]:
    """The key of that name, or the keys of that section; all for an empty name.

    Raises:
        InputError: There is no such key.
    """
    known: list[Key] = []  # each section is followed by the keys of one item of its lists
    for _, section in groupby(explain(), key=_section):
        keys = list(section)
        for kind in (keys, *map(item_keys, keys)):
            known += [key for of_kind in _by_kind(kind).values() for key in of_kind]
    selected = [key for key in known if not prefix or key.name == prefix or key.name.startswith(f"{prefix}.")]
    if not selected:
        names = {key.name for key in known} | {key.name.split(".")[0] for key in known}
        raise InputError(prefix, "is not a key", nearest(prefix, names))
    return selected


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


def print_keys(prefix: str, console: Console) -> None:
    """Print each key with its meaning below; into a pipe a line each, so that `grep` shows all of it."""
    keys = select_keys(prefix)
    if console.is_terminal and not prefix:
        console.print(Text("Keys to begin with", "bold"))
        for name in STARTING_KEYS:
            key = next(key for key in keys if key.name == name)
            console.print(Text.assemble((f"  {name}", "cyan"), f"  {key.meaning}"), overflow="fold")
        console.print(Text("\nAll keys, by section", "bold"))
    for key in keys:
        resume = "may change on resume" if key.on_resume else "fixed"
        facts = f"{_kind(key)}; default {key.default}; {resume}{f'; with {key.owner}' if key.owner else ''}"
        if not console.is_terminal:
            console.print(Text(f"{key.name}  {facts}  {key.meaning}"), soft_wrap=True)
            continue
        console.print(Text.assemble((key.name, "bold cyan"), "  ", (facts, "dim")), overflow="fold")
        console.print(Padding(Text(key.meaning), (0, 0, 1, 4)))


def _by_kind(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """The keys by their owners, first those without one."""
    kinds: dict[str, list[Key]] = {"": []}
    for key in keys:
        kinds.setdefault(key.owner, []).append(key)
    return kinds


def _kind(key: Key) -> str:
    return f"{key.type}, {key.bounds}" if key.bounds else key.type


def markdown(prefix: str) -> str:
    """The keys as Markdown, a table for each section: first the keys of all its kinds, then those of each."""
    selected = select_keys(prefix)
    parts = [] if prefix else _starting_table(selected)
    for section, keys in groupby(selected, key=_section):
        parts.append(
            f"## {section or 'The run'}\n\n| key | type | default | on resume | meaning |\n|---|---|---|---|---|"
        )
        for owner, owned in _by_kind(keys).items():
            parts += [_row(f"*with {owner}*", *[""] * 4)] if owner else []
            for key in owned:
                changes = "may change" if key.on_resume else "fixed"
                parts.append(_row(f"`{key.name}`", _kind(key), f"`{key.default}`", changes, key.meaning))
        parts.append("")
    return "\n".join(parts)


def _starting_table(keys: list[Key]) -> list[str]:
    by_name = {key.name: key for key in keys}
    rows = [_row(f"`{name}`", f"`{by_name[name].default}`", by_name[name].meaning) for name in STARTING_KEYS]
    return ["## Keys to begin with", "", "| key | default | meaning |", "|---|---|---|", *rows, ""]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
