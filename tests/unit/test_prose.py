"""The prose check can fail: each rule of deploy/lint/prose.toml on its bad and its good sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_check() -> ModuleType:
    """Load deploy/lint/prose.py, which is a script and no module of a package."""
    spec = importlib.util.spec_from_file_location("prose", ROOT / "deploy/lint/prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prose = load_check()


def broken(text: str) -> set[str]:
    """The names of the rules that a text breaks."""
    return {rule for rule, _, _ in prose.alerts(text)}


@pytest.mark.parametrize("rule", prose.RULES["rule"], ids=lambda rule: str(rule["name"]))
def test_a_rule_catches_its_bad_sentence_and_passes_its_good_one(rule: dict[str, str]) -> None:
    assert rule["name"] in broken(rule["bad"])
    assert broken(rule["good"]) == set()


def test_a_sentence_has_at_most_thirty_words() -> None:
    sentence = " ".join(["word"] * 30)
    assert broken(f"{sentence}. {sentence.capitalize()}.") == set()
    assert broken(f"{sentence} more.") == {"long"}


def test_a_paragraph_has_at_most_120_words() -> None:
    sentence = " ".join(["Word"] + ["word"] * 29) + ". "
    assert broken(sentence * 4) == set()
    assert broken(sentence * 4 + "More.") == {"paragraph"}


def test_a_chain_of_semicolons_is_refused() -> None:
    clause = "the learner trains one more step"
    assert broken(f"First {clause}; then {clause}.") == set()
    assert broken(f"First {clause}; then {clause}; then {clause}.") == {"semicolons"}


def test_markdown_is_read_without_code_and_cell_by_cell() -> None:
    source = "# Head\n\nOne `door` and\ntwo.\n\n```sh\ndoor\n```\n\n| a | b |\n|---|---|\n| door | c |\n\n- item\n"
    texts = [(1, "Head"), (3, "One `x` and\ntwo."), (10, "a"), (10, "b"), (12, "door"), (12, "c"), (14, "item")]
    assert list(prose.markdown_texts(source)) == texts


def test_python_is_read_in_docstrings_comments_and_messages() -> None:
    source = '"""Module.\n\nMore."""\n# One\n# two.\nx = 1  # three\nerror = f"the file {x} is not there"\n'
    texts = [(1, "Module."), (3, "More."), (7, "the file `x` is not there"), (4, "One two."), (6, "three")]
    assert list(prose.python_texts(source, messages=True)) == texts
    assert (7, "the file `x` is not there") not in list(prose.python_texts(source, messages=False))


def test_other_files_are_read_in_comments_helps_and_alert_texts() -> None:
    source = "# One\n# two.\nlint: setup ## Run ruff\n  summary: A door.\n  expr: door\n"
    assert list(prose.comment_texts(source)) == [(1, "One two."), (3, "Run ruff"), (4, "A door.")]


def test_a_list_of_names_is_no_long_sentence() -> None:
    assert broken("Keys are " + ", ".join(["`key`"] * 40) + " and `key`.") == set()


def test_a_paragraph_of_markdown_is_one_line() -> None:
    assert [rule for _, rule, _, _ in prose.file_alerts("a.md", "# Head\n\nOne\nparagraph.\n")] == ["line-break"]
    assert list(prose.file_alerts("a.md", "# Head\n\nOne paragraph.\n\n- Item\n- Item\n\n```\na\nb\n```\n")) == []
    assert list(prose.file_alerts("a.md.j2", "{% if one %}\nOne paragraph.\n{% endif %}\n")) == []


def test_every_page_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "ALLOWED", tmp_path / "prose_allowed.tsv")
    monkeypatch.setattr(prose.subprocess, "check_output", lambda *_, **__: "page.md\nmodule.py\n")
    (tmp_path / "page.md").write_text("A paused run.\n")
    (tmp_path / "module.py").write_text('"""A module."""\n')
    assert prose.main([]) == 0
    (tmp_path / "page.md").write_text("A door.\n")
    assert prose.main([]) == 1


def test_the_allowed_numbers_only_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, allowed = tmp_path / "page.md", tmp_path / "prose_allowed.tsv"
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "ALLOWED", allowed)
    monkeypatch.setattr(prose.subprocess, "check_output", lambda *_, **__: "page.md\n")
    page.write_text("A door.\n\nA room.\n")
    allowed.write_text("page.md\t2\n")
    assert prose.main([]) == 0
    page.write_text("A door.\n")
    assert prose.main([]) == 1, "fewer alerts than allowed"
    assert prose.main(["--allow"]) == 0
    assert allowed.read_text() == "page.md\t1\n"
    page.write_text("A door.\n\nA room.\n")
    assert prose.main([]) == 1, "more alerts than allowed"
    prose.main(["--allow"])
    assert allowed.read_text() == "page.md\t1\n", "the numbers never rise"
    allowed.unlink()
    assert prose.main([]) == 1, "nothing is allowed without the file"
