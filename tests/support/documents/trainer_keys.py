"""The keys of other trainers that the page on migration names, and those of the trainers' own configurations.

trainer_keys.yml beside this file has each key with its default and a word of its own description.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parents[3] / "docs/migration.md"
TRAINERS = ("trl", "verl", "openrlhf")
_KEYS = Path(__file__).with_name("trainer_keys.yml")
_PREFIX = "actor_rollout_ref."
_SECTIONS = ("actor", "rollout", "ref", "model")
# Places and values in the page's cells that are no keys: arguments of a trainer's class, columns of the data.
_NO_KEYS = {
    "trl": {"model", "train_dataset", "eval_dataset", "reward_funcs", "peft_config", "prompt", "grpo", "token_*",
            "sequence_*"},
    "verl": {"ground_truth", "reward_model", "dppo_kl", "low_var_kl", "token", "sequence"},
    "openrlhf": set(),
}  # fmt: skip


@dataclass(frozen=True)
class TrainerKey:
    """A key of a trainer's configuration.

    Attributes:
        description: The trainer's own words about it; empty without any.
    """

    default: Any
    description: str


def expected_keys(trainer: str) -> dict[str, tuple[Any, str]]:
    """Key -> its default, and a word of its description, as the page relies on them."""
    keys: dict[str, list[Any]] = yaml.safe_load(_KEYS.read_text())[trainer]
    return {name: (default, word) for name, (default, word) in keys.items()}


def named_keys(trainer: str) -> set[str]:
    """The trainer's keys that the page names, by their full names."""
    cells = [cell for cell, of_whom in _cells() if of_whom == trainer]
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    return {full_name(trainer, re.split(r"[: ]", name)[0]) for name in names if name not in _NO_KEYS[trainer]}


def full_name(trainer: str, name: str) -> str:
    """A key of verl without the page's abbreviation of `actor_rollout_ref.`."""
    return f"{_PREFIX}{name}" if trainer == "verl" and name.partition(".")[0] in _SECTIONS else name


def _cells() -> Iterator[tuple[str, str]]:
    """Each cell about another trainer, with the trainer."""
    columns: list[str] = []
    for line in PAGE.read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if {"TRL", "verl", "OpenRLHF"} <= set(row):
            columns = [cell.lower() for cell in row]
        elif row[:2] == ["trainer", "keys"]:
            columns = row
        elif row[:1] == ["here"]:  # of trainers without a list of keys
            columns = []
        elif columns[:2] == ["trainer", "keys"] and row:
            yield row[1], row[0].lower()
        else:
            yield from ((cell, name) for cell, name in zip(row, columns, strict=False) if name in TRAINERS)


def verl_keys(package: Path) -> dict[str, TrainerKey]:
    """The keys of verl's default configuration, from the folder of its package, which is not imported."""
    folder = package / "trainer/config"
    comments: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        seen: list[str] = []
        for line in path.read_text().splitlines():
            if match := re.match(r"\s*#\s?(.*)", line):
                seen.append(match[1])
            elif match := re.match(r"\s*'?(\w+)'?:", line):
                comments.setdefault(match[1], []).extend(seen)
                seen = []
    values: dict[str, Any] = {}
    for engine in ("megatron_", ""):  # the page names a key that Megatron's alone has
        values |= dict(_flat(yaml.safe_load((folder / f"_generated_ppo_{engine}trainer.yaml").read_text())))
    return {name: TrainerKey(value, " ".join(comments.get(name.split(".")[-1], []))) for name, value in values.items()}


def _flat(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in keys.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def openrlhf_keys(package: Path) -> dict[str, TrainerKey]:
    """The arguments of `train_ppo_ray`, read from its source; those of a prefix are the actor's and the critic's."""
    keys: dict[str, TrainerKey] = {}
    for call in ast.walk(ast.parse((package / "cli/train_ppo_ray.py").read_text())):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"):
            continue
        options = {option.arg: option.value for option in call.keywords}
        for prefix in ("actor", "critic"):
            name = _text(call.args[0], prefix)
            keys[name] = TrainerKey(_value(options.get("default"), prefix), _text(options.get("help"), prefix))
    return keys


def _text(node: ast.expr | None, prefix: str) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else prefix for part in node.values)  # type: ignore[misc]
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _value(node: ast.expr | None, prefix: str) -> Any:
    """A default as a value, tuples as lists; of a condition on the prefix, its branch."""
    if isinstance(node, ast.IfExp):
        return _value(node.body if prefix == "actor" else node.orelse, prefix)
    try:
        value = None if node is None else ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)  # type: ignore[arg-type]
    return list(value) if isinstance(value, tuple) else value
