"""Every key of the configuration has another value than its default in some test, example or benchmark.

A key that nothing varies is better a constant: no other value was ever seen to work.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from gspo.common.config.reference import explain

ROOT = Path(__file__).parents[4]
# (place, name, value): the place is a path, a call, or the key above, and tells apart keys of one name.
Use = tuple[str, str, Any]


def literal(node: ast.AST) -> Any:
    """The value of a literal; the node itself, which equals no default, where it is computed."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return node


def uses_in_python(node: ast.AST, place: str) -> Iterator[Use]:
    """Members of mappings, keyword arguments and assignments to members."""
    members: list[tuple[Any, ast.AST]] = []
    if isinstance(node, ast.Dict):
        members = [(literal(key), value) for key, value in zip(node.keys, node.values, strict=True) if key]
    elif isinstance(node, ast.Call):
        # `changed(given, "learner", ranks=2)` and `LearnerConfig(ranks=2)` name the section.
        texts = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        place = " ".join([place, ast.unparse(node.func).lower(), *texts])
        members = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
    elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript):
        place = f"{place} {ast.unparse(target.value)}"
        members = [(literal(target.slice), node.value)]
    for name, value in members:
        if isinstance(name, str):
            yield place, name, literal(value)
            yield from uses_in_python(value, name)
    inner = {id(value) for _, value in members}
    for child in ast.iter_child_nodes(node):
        child = child.value if isinstance(child, ast.keyword) else child
        if id(child) not in inner:
            yield from uses_in_python(child, place)


def uses_in_yaml(value: Any, place: str) -> Iterator[Use]:
    for name, member in value.items() if isinstance(value, dict) else ():
        yield place, name, member
        yield from uses_in_yaml(member, name)


def varied(uses: list[Use]) -> set[str]:
    """The keys that have another value than their default in one of these uses."""
    defaults = {key.name: key.default for key in explain()}
    num_of_name = Counter(key.rpartition(".")[2] for key in defaults)
    keys = set()
    for key, default in defaults.items():
        section, _, name = key.rpartition(".")
        section = section.rpartition(".")[2]
        for place, used, value in uses:
            if used == name and (num_of_name[name] == 1 or section in place):
                value = list(value) if isinstance(value, tuple) else value
                if default == "required" or value != yaml.safe_load(default):
                    keys.add(key)
    return keys


def test_every_key_is_varied_by_a_test_an_example_or_a_benchmark() -> None:
    uses: list[Use] = []
    for folder in ("tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            uses += uses_in_python(ast.parse(path.read_text()), str(path.relative_to(ROOT)))
    for path in [*ROOT.glob("examples/*/config.yaml"), ROOT / "services/gspo/cli/templates/example_config.yaml"]:
        uses += uses_in_yaml(yaml.safe_load(path.read_text()), "")
    missing = {key.name for key in explain()} - varied(uses)
    assert not missing, f"make {', '.join(sorted(missing))} constants, or test them with another value"


def test_a_default_does_not_count_as_varied() -> None:
    source = 'parse({"learner": {"threads": 0, "ranks": 2}, "staleness": {"max_lag": 1}}); LearnerConfig(threads=num)'
    keys = varied([*uses_in_python(ast.parse(source), "")])
    assert keys == {"learner.threads", "learner.ranks"}
    assert varied([*uses_in_yaml({"generation": {"threads": 3}}, "")]) == {"generation.threads"}
