"""Names: no forbidden word, one definition a class name, no module name twice in a service, small folders.

The glossary in ARCHITECTURE.md has the words to use. names_allowed.txt lists the breaks that still stand; an entry that
no longer applies fails too, so the list only shrinks. Each rule is shown to fail on a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.repository.source_files import ROOT, fail_with, nodes, place, text_of

ALLOWED = Path(__file__).with_name("names_allowed.txt")
ROOTS = ("services", "gspo_core", "tests", "benchmarks", "examples", "deploy")
SERVICES = ("agents", "cli", "coordinator", "gateway", "generation", "learner", "reward", "tracking", "view")
MAX_MODULES = 12
# In a name, as one of its parts.
FORBIDDEN = {
    "aside", "buried", "buries", "bury", "crew", "door", "doors", "held", "life", "lives", "mark", "marked",
    "marks", "meeting", "meetings", "misfit", "misfits", "nickname", "obey", "obeys", "orders", "road", "roads",
    "room", "rooms", "told", "turn", "turns", "whoever", "wish", "wishes",
}  # fmt: skip
# In a name, as parts that follow one another.
FORBIDDEN_PAIRS = {("under", "way"), ("house", "rule")}
# As a whole name of a variable, attribute, parameter, function or class.
SAYS_NOTHING = {"found", "given", "left", "made", "one", "said", "told", "wanted"}
# A turn belongs to a conversation: a module that has a name with it speaks of one.
CONVERSATION = re.compile(r"conversation|episode|\b(an|the) environment\b", re.IGNORECASE)
# A held-out set has two words.
HELD_OUT = re.compile(r"held_?out", re.IGNORECASE)


def parts(name: str) -> list[str]:
    """Split a name at underscores and capitals, in lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def modules(root: Path) -> dict[str, str]:
    """Source by path, of every module that is written by hand."""
    paths = (path for folder in ROOTS for path in sorted((root / folder).rglob("*.py")))
    return {str(path.relative_to(root)): text_of(path) for path in paths if "_pb2" not in path.name}


def defined_names(source: str) -> Iterator[str]:
    """Every name that a module defines: classes, functions, parameters, variables, attributes."""
    for node in nodes(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


@cache
def forbidden_words(source: str) -> set[str]:
    """The forbidden words in a module; a turn is allowed where it speaks of conversations."""
    return FORBIDDEN - ({"turn", "turns"} if CONVERSATION.search(source) else set())


def is_forbidden(name: str, source: str) -> bool:
    """Tell if a name contains a forbidden word; the source is that of its module."""
    words = parts(HELD_OUT.sub("heldout", name))
    return bool(
        forbidden_words(source) & set(words)
        or FORBIDDEN_PAIRS & set(pairwise(words))
        or name.strip("_") in SAYS_NOTHING
    )


def forbidden_names(tree: dict[str, str]) -> set[str]:
    """Find the forbidden words in the names of modules, folders and their definitions."""
    breaks = set()
    for path, source in tree.items():
        breaks |= {f"module {path}" for part in Path(path).with_suffix("").parts if is_forbidden(part, source)}
        breaks |= {f"name {path} {name}" for name in defined_names(source) if is_forbidden(name, source)}
    return breaks


def repeated_classes(tree: dict[str, str]) -> set[str]:
    """Find the classes of a name that another class has, private and nested ones too."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in tree.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return {f"class {name} {path}" for name, paths in places.items() if len(paths) > 1 for path in paths}


def repeated_modules(tree: dict[str, str]) -> set[str]:
    """Find the modules of a service of whose name there is another in it."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in tree:
        folders, stem = Path(path).parts[:-1], Path(path).stem
        service = next((folder for folder in folders if folders[0] == "services" and folder in SERVICES), None)
        if service and stem not in ("__init__", "__main__"):
            places[service, stem].append(path)
    return {f"stem {path}" for paths in places.values() if len(paths) > 1 for path in paths}


def large_folders(tree: dict[str, str]) -> set[str]:
    """Find the folders with too many modules, their sub-packages not counted."""
    counts: dict[str, int] = defaultdict(int)
    for path in tree:
        counts[str(Path(path).parent)] += Path(path).stem not in ("__init__", "__main__", "conftest")
    return {f"folder {folder}" for folder, count in counts.items() if count > MAX_MODULES}


FIXES = {
    "module": "a forbidden word: the glossary of ARCHITECTURE.md has the one to use",
    "name": "a forbidden word: the glossary of ARCHITECTURE.md has the one to use",
    "class": "another class has this name: say what this one is",
    "stem": "another module of the service has this name: say what this one does",
    "folder": f"more than {MAX_MODULES} modules: split it",
}
RULES = (forbidden_names, repeated_classes, repeated_modules, large_folders)


def where(words: str) -> str:
    """Return a break as `file:line: rule: fix`."""
    kind, *rest = words.split(" ")
    path = next(part for part in rest if "/" in part)
    name = next((part for part in rest if "/" not in part), "")
    start = place(path, name) if path.endswith(".py") else path
    return f"{start}: {' '.join((kind, name)).strip()}: {FIXES[kind]}"


@pytest.fixture(scope="module")
def breaks() -> set[str]:
    tree = modules(ROOT)
    return set().union(*(rule(tree) for rule in RULES))


@pytest.fixture(scope="module")
def allowed() -> set[str]:
    return set(ALLOWED.read_text().splitlines()) if ALLOWED.exists() else set()


def test_no_name_breaks_a_rule(breaks: set[str], allowed: set[str]) -> None:
    fail_with(where(words) for words in sorted(breaks - allowed))


def test_every_allowed_break_still_stands(breaks: set[str], allowed: set[str]) -> None:
    gone = sorted(allowed - breaks)
    fail_with(f"{place(ALLOWED, words)}: {words}: it no longer stands: take the line out" for words in gone)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def open_door(): pass", "open_door"),
        ("class RunLife: pass", "RunLife"),
        ("GPUWishes = 1", "GPUWishes"),
        ("def f(under_way): pass", "under_way"),
        ("self.held = 1", "held"),
        ("found = 1", "found"),
        ("for one in ones: pass", "one"),
        ("lease_turn = 1", "lease_turn"),
        ("import streams as room", "room"),
        ("try: f()\nexcept OSError as told: pass", "told"),
        ("async def test_it_is_buried(): pass", "test_it_is_buried"),
    ],
)
def test_a_forbidden_name_fails(source: str, name: str) -> None:
    assert forbidden_names({"services/learner/x.py": source}) == {f"name services/learner/x.py {name}"}


@pytest.mark.parametrize(
    "source",
    [
        "held_out = 1",
        "class HeldOutSet: pass",
        "class Doorway: pass",  # another word
        "alive = lifetime = returned = 1",
        "@pytest.mark.long\ndef test_it(): pass",  # a name of others is used, not defined
        "one_step = found_entries = 1",
    ],
)
def test_other_names_pass(source: str) -> None:
    assert forbidden_names({"services/learner/x.py": source}) == set()


def test_a_turn_belongs_to_a_conversation() -> None:
    assert forbidden_names({"services/learner/x.py": '"""Of a conversation."""\nmax_turns = 1'}) == set()
    assert forbidden_names({"services/learner/x.py": "max_turns = 1"}) == {"name services/learner/x.py max_turns"}


def test_a_module_with_a_forbidden_name_fails() -> None:
    assert forbidden_names({"services/reward/door/app.py": ""}) == {"module services/reward/door/app.py"}


def test_a_class_name_twice_in_the_tree_fails() -> None:
    tree = {"services/learner/a.py": "class _Slot: pass", "tests/b.py": "def f():\n    class _Slot: pass"}
    assert repeated_classes(tree) == {"class _Slot services/learner/a.py", "class _Slot tests/b.py"}
    assert repeated_classes({"a.py": "class A: pass", "b.py": "class B: pass"}) == set()


def test_a_module_name_twice_in_a_service_fails() -> None:
    tree = {"services/gspo/learner/loop.py": "", "services/gspo/learner/push/loop.py": ""}
    assert repeated_modules(tree) == {"stem services/gspo/learner/loop.py", "stem services/gspo/learner/push/loop.py"}
    assert repeated_modules({"services/gspo/learner/loop.py": "", "services/gspo/reward/loop.py": ""}) == set()
    assert repeated_modules({"services/gspo/cli/__init__.py": "", "services/gspo/cli/x/__init__.py": ""}) == set()


def test_a_folder_of_thirteen_modules_fails() -> None:
    tree = {f"services/gspo/cli/{chr(97 + number)}.py": "" for number in range(12)}
    assert large_folders(tree | {"services/gspo/cli/__init__.py": "", "services/gspo/cli/x/y.py": ""}) == set()
    assert large_folders(tree | {"services/gspo/cli/m.py": ""}) == {"folder services/gspo/cli"}
