"""`gspo init`: an example that reads well and scores, with its model in the folder wherever the disk allows it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any, cast

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from gspo.cli import scaffold
from gspo.cli.scaffold import write_example
from gspo.common.config.loading import read_config
from gspo.common.config.presets import fitting_clip
from gspo.common.errors import InputError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As a snapshot of a hub: links to blobs, with a folder in it."""
    blob, folder = tmp_path / "blob", tmp_path / "published"
    (folder / "templates").mkdir(parents=True)
    blob.write_text("weights")
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").write_text("{}")
    (folder / "templates" / "chat.jinja").write_text("{{ messages }}")
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_example_reads_well_and_scores(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    paths, _ = write_example(folder, str(model))
    assert paths == [folder / name for name in ("config.yaml", "reward.py", "prompts.jsonl", "eval.jsonl")]
    config = read_config(folder / "config.yaml")
    assert config.algorithm.clip == fitting_clip(8) == (0.0068, 0.0091)
    assert (config.name, config.run_dir, config.learner.learning_rate) == ("my-run", folder / "runs" / "my-run", 1e-6)
    prompts, held_out = rows_of(folder / "prompts.jsonl"), rows_of(folder / "eval.jsonl")
    assert (len(prompts), len(held_out)) == (1000, 100)
    assert not {row["prompt"][0]["content"] for row in prompts} & {row["prompt"][0]["content"] for row in held_out}
    a, b = re.findall(r"\d+", prompts[0]["prompt"][0]["content"])
    assert prompts[0]["answer"] == str(int(a) + int(b))

    spec = importlib.util.spec_from_file_location("example_reward", config.reward.functions[0].path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers = [[{"role": "assistant", "content": text}] for text in ("17 + 25 is 42.", "41", "")]
    assert module.reward([[], [], []], answers, answer=["42", "42", "42"]) == [1.0, 0.0, 0.0]


def test_a_model_is_linked_into_the_folder_that_containers_mount(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "example"
    _, notes = write_example(folder, str(model))
    assert "\n  path: model  " in (folder / "config.yaml").read_text()
    assert read_config(folder / "config.yaml").model.path == str(folder / "model")
    weights = folder / "model" / "model.safetensors"
    assert not weights.is_symlink() and weights.samefile(tmp_path / "blob")
    assert (folder / "model" / "templates" / "chat.jinja").read_text() == "{{ messages }}"
    assert notes == [f"\n{folder / 'model'}: the files of {model}, linked without a copy"]


def test_a_model_in_the_folder_stays_where_it_is(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "example"
    folder.mkdir()
    model.rename(folder / "model")
    assert write_example(folder, str(folder / "model"))[1] == []
    assert read_config(folder / "config.yaml").model.path == str(folder / "model")


def test_an_example_inside_its_model_ends(model: Path) -> None:
    folder = model / "example"
    write_example(folder, str(model))
    assert {path.name for path in (folder / "model").iterdir()} == {"config.json", "model.safetensors", "templates"}


def test_a_disk_without_links_leaves_the_model_and_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = tmp_path / "example"
    (note,) = write_example(folder, str(model))[1]
    assert f"the model stays at {model}; containers see {folder} alone" in note
    assert read_config(folder / "config.yaml").model.path == str(model)
    assert not (folder / "model").exists()


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_half_an_example_is_removed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, exists: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    folder = tmp_path / "example"
    if exists:
        folder.mkdir()
        (folder / "notes.txt").touch()
    with monkeypatch.context() as patch:
        patch.setattr("gspo.cli.scaffold._config_text", fail)
        with pytest.raises(type(error)):
            write_example(folder, str(model))
    assert [path.name for path in tmp_path.glob("example/*")] == ["notes.txt"] * exists
    write_example(folder, str(model))
    assert (model / "config.json").is_file()


@pytest.mark.parametrize("name", ["{tmp}/none", "./none", "a/b/c", "{tmp}"])
def test_a_path_without_a_model_writes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^--model: there is no model at .*no config\.json"):
        write_example(tmp_path / "example", name.format(tmp=tmp_path))
    assert not (tmp_path / "example").exists()


def answer_for_hub(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Stands for the hub, which tests do not ask."""

    def answer(_url: str) -> None:
        if error:
            raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)


def test_a_name_on_a_hub_stays_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_for_hub(monkeypatch, None)
    assert write_example(tmp_path / "example", "Qwen/Qwen3-0.6B")[1] == []
    assert read_config(tmp_path / "example" / "config.yaml").model.path == "Qwen/Qwen3-0.6B"


def test_a_name_that_the_hub_lacks_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = httpx.Response(404, request=httpx.Request("HEAD", "https://hub"))
    answer_for_hub(monkeypatch, RepositoryNotFoundError("no such repository", response=cast(Any, refusal)))
    with pytest.raises(InputError, match="--model: there is no model no/one, neither a folder here nor on the hub"):
        write_example(tmp_path / "example", "no/one")
    assert not (tmp_path / "example").exists()


def test_a_name_without_a_way_to_its_hub_is_kept_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_for_hub(monkeypatch, httpx.ConnectError("no connection"))
    (note,) = write_example(tmp_path / "example", "no/one")[1]
    assert "no/one: it is not a folder here" in note and "The first start fetches it" in note


# Stands for the cold start of a hundred seconds; the nightly test of docs/start.md makes the real one.
COLD_START = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "model").mkdir(parents=True)
(folder / "model" / "config.json").write_text("{}")
for name in ("prompts.jsonl", "eval.jsonl"):
    (folder / name).write_text('{"prompt": "1+1=", "answer": "2"}\\n')
"""


def test_tiny_has_the_model_the_prompts_and_the_keys_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, folder = tmp_path / "cold_start.py", tmp_path / "my-run"
    script.write_text(COLD_START)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scaffold, "_COLD_START", script)
    monkeypatch.setattr(scaffold, "_CACHE", tmp_path / "cache")
    write_example(Path("my-run"), "tiny")
    assert f"```yaml\n{(folder / 'config.yaml').read_text()}```\n" in (ROOT / "docs/start.md").read_text()
    config = read_config(folder / "config.yaml")
    assert (config.model.path, config.algorithm.clip) == (str(folder / "model"), (0.1, 0.1))
    assert config.learner.learning_rate == 2e-4
    assert rows_of(folder / "prompts.jsonl") == rows_of(tmp_path / "cache" / "eval.jsonl")


def test_tiny_needs_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "_COLD_START", tmp_path / "none.py")
    with pytest.raises(InputError, match=r"tiny is made by examples/arithmetic.*make setup"):
        write_example(tmp_path / "example", "tiny")
