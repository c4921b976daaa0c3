"""Chat templates of strangers, and of published models: the former are refused in seconds, the latter pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.common.errors import InputError
from gspo.common.model.template_trial import check_chat_template
from tests.support import chat_templates
from tests.support.tiny_model import CHAT_TEMPLATE

HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 5 s"),
    "multiplies": ("{{ 'a' * 10**10 }}", "or 1 GiB"),
    "writes": ("{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "more than 1,048,576 characters"),
}


@pytest.mark.parametrize(
    ("case", "file"),
    [*((case, "chat_template.jinja") for case in HOSTILE), ("writes", "tokenizer_config.json")],
)
def test_a_template_without_an_end_is_refused(tmp_path: Path, case: str, file: str) -> None:
    template, words = HOSTILE[case]
    content = template if file.endswith("jinja") else json.dumps({"chat_template": template})
    (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match=f"model.path: the chat template of .* {words}"):
        check_chat_template(tmp_path)


@pytest.mark.parametrize("templates", [["{{ 1 }}"] * 100, ["{{ 1 }}" * 200_000]], ids=["many", "long"])
def test_templates_beyond_the_bound_are_not_tried(tmp_path: Path, templates: list[str]) -> None:
    named = [{"name": str(number), "template": template} for number, template in enumerate(templates)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(InputError, match="has more than 20 chat templates, or of 1,048,576 characters together"):
        check_chat_template(tmp_path)


def test_other_templates_pass(tmp_path: Path) -> None:
    """Also those that refuse the messages of the trial."""
    known = [value for value in vars(chat_templates).values() if isinstance(value, str) and "{%" in value]
    assert known
    for number, template in enumerate([*known, CHAT_TEMPLATE, "{{ raise_exception('no') }}", "{% broken", ""]):
        folder = tmp_path / str(number)
        folder.mkdir()
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": template}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        check_chat_template(folder)


def test_files_of_the_working_directory_have_no_part_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inspect.py").write_text("raise RuntimeError")
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    monkeypatch.chdir(tmp_path)
    check_chat_template(tmp_path)


def test_a_folder_without_a_template_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)  # refused by those that need it
    check_chat_template(tmp_path)
