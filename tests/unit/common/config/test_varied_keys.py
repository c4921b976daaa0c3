"""Every key of the configuration is read by a service, and varied: some test, example or benchmark has another value.

A key that nothing varies is better a constant: no other value was ever seen to work.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

from gspo.common.config.fields import Section
from gspo.common.config.reference import Key, explain, item_keys
from gspo.common.config.schema import Config
from gspo.common.config.sources import CodeSpec

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


def all_keys() -> list[Key]:
    """Return every key, those of one member of each list included."""
    keys = explain()
    return [*keys, *(inner for key in keys for inner in item_keys(key))]


def varied(uses: list[Use]) -> set[str]:
    """The keys that have another value than their default in one of these uses."""
    defaults = {key.name: key.default for key in all_keys()}
    num_of_name = Counter(key.rpartition(".")[2] for key in defaults)
    keys = set()
    for key, default in defaults.items():
        section, _, name = key.removesuffix(".N").rpartition(".")
        section = section.removesuffix(".N").rpartition(".")[2]
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
    missing = {key.name for key in all_keys()} - varied(uses)
    assert not missing, f"make {', '.join(sorted(missing))} constants, or test them with another value"


def test_a_default_does_not_count_as_varied() -> None:
    source = 'parse({"learner": {"threads": 0, "ranks": 2}, "staleness": {"max_lag": 1}}); LearnerConfig(threads=num)'
    keys = varied([*uses_in_python(ast.parse(source), "")])
    assert keys == {"learner.threads", "learner.ranks"}
    assert varied([*uses_in_yaml({"generation": {"threads": 3}}, "")]) == {"generation.threads"}


def sections_of(section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Yield every section with the name that it has in another, those of lists included."""
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield name, kind
                yield from sections_of(kind)


class Readers:
    """The reads of attributes in the services, by the names under which they have a section."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.names: dict[type[Section], set[str]] = defaultdict(set)
        self.reads: dict[str, set[str]] = defaultdict(set)  # attribute -> the names in front of it
        self._is_field = dict(sections_of(Config))
        for name, section in sections_of(Config):
            self.names[section] |= {name, name.removesuffix("s")}
        for tree in trees:
            self._see_names(tree)
        for tree in trees:
            self._see_reads(tree)

    def _see_names(self, tree: ast.Module) -> None:
        """Note the parameters and variables that a section has in a module."""
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.annotation:
                self._see_annotation(node.arg, node.annotation)
            elif isinstance(node, ast.AnnAssign):
                self._see_annotation(last_name(node.target), node.annotation)
            elif isinstance(node, ast.Assign) and last_name(node.value) in self._is_field:
                self.names[self._is_field[last_name(node.value)]].add(last_name(node.targets[0]))

    def _see_annotation(self, name: str, annotation: ast.expr) -> None:
        text = ast.unparse(annotation).replace("CodeSpec", " ".join(part.__name__ for part in get_args(CodeSpec)))
        for section in set(self._is_field.values()):
            if re.search(rf"\b{section.__name__}\b", text):
                self.names[section].add(name.strip("_"))

    def _see_reads(self, tree: ast.Module) -> None:
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and last_name(inner.value) == "self":
                        self.reads[inner.attr].add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.reads[node.attr].add(last_name(node.value))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                for text in texts:
                    self.reads[text].add(last_name(node.args[0]))

    def unread(self) -> set[str]:
        """Return the keys that nothing reads from their section."""
        return {
            f"{section.__name__}.{key}"
            for section, names in self.names.items()
            for key in section.model_fields
            if not self.reads[key] & (names | {part.__name__ for part in section.__mro__})
        }


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, without an underscore."""
    return ast.unparse(node).rpartition(".")[2].strip("_")


def test_every_key_is_read_by_a_service() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "services").rglob("*.py")]
    assert not Readers(trees).unread()


def test_a_key_that_is_read_from_another_section_does_not_count() -> None:
    source = "def play(environment: EnvironmentConfig, spec: RewardFunction):\n    environment.path; spec.weight"
    unread = Readers([ast.parse(source)]).unread()
    assert {"EnvironmentConfig.weight", "RewardFunction.path"} <= unread
    assert not {"EnvironmentConfig.path", "RewardFunction.weight"} & unread
