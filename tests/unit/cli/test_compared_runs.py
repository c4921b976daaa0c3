"""Runs beside each other on the page of `gspo view`: curves, configurations, answers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gspo.cli.monitor.viewed_runs import viewed_runs
from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME, write_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.learner.storage.run_directory import RunDir
from gspo.view.comparison import MAX_RUNS
from gspo.view.http_api import make_page
from tests.unit.view.test_report import evaluate, row, train


def make_run_dir(config: Config, folder: Path, num_steps: int, reward: float) -> Path:
    """A run of some steps, with a prompt of its own in the last one."""
    folder.mkdir(parents=True)
    write_config(config, folder / CONFIG_NAME)
    (folder / ENVIRONMENT_NAME).write_text("{}")
    with RunDir(folder) as run:
        evaluate(run, 0, 0.25)
        train(run, 1, num_steps, reward_mean=reward)
        own = [row(num_steps + 1, 900, number, prompt=f"only {folder.name}") for number in range(2)]
        run.write_step(num_steps + 1, own)
    return folder


@pytest.fixture
def run_dirs(config: Config, tmp_path: Path) -> list[Path]:
    other = config.model_copy(
        update={"learner": config.learner.model_copy(update={"learning_rate": 0.125}), "name": "other"}
    )
    return [
        make_run_dir(config, tmp_path / "a", 4, 0.5),
        make_run_dir(other, tmp_path / "b", 6, 0.75),
    ]


@pytest.fixture
def client(run_dirs: list[Path]) -> TestClient:
    return TestClient(make_page(viewed_runs(run_dirs), []), base_url="http://127.0.0.1")


def test_each_run_has_a_line_in_each_curve(client: TestClient) -> None:
    curves = {curve["name"]: curve for curve in client.get("/api/comparison").json()}
    reward = curves["reward"]
    assert reward["steps"] == list(range(1, 7))
    first, second = reward["lines"]
    assert first["values"] == [*[0.5] * 4, None, None]
    assert second["values"] == [0.75] * 6
    assert second["label"] == "other"
    assert first["colour"] != second["colour"]
    assert [line["values"][0] for line in curves["held_out"]["lines"]] == [0.25, 0.25]
    assert {len(curve["lines"]) for curve in curves.values()} == {2}


def test_only_keys_that_differ_are_shown(client: TestClient, config: Config) -> None:
    text = " ".join(client.get("/compare").text.split())
    rate = json.dumps(config.learner.learning_rate)
    assert (
        f'<th scope="row">learner.learning_rate</th><td class="prompt">{rate}</td><td class="prompt">0.125</td>' in text
    )
    assert "algorithm.prompt_length" not in text
    assert '<td class="prompt">&#34;other&#34;</td>' in text


def test_answers_to_the_prompts_that_all_runs_have(client: TestClient) -> None:
    text = client.get("/compare").text
    assert "only a" not in text
    assert text.index("What is 15 + 1?") < text.index("What is 10 + 1?"), "those of the last step first"
    prompts = text.partition("Answers to the same prompts")[2]
    assert prompts.count("<h3>") == 5
    page = client.get("/compare", params={"q": "is 3 +"}).text
    assert page.partition("Answers to the same prompts")[2].count("<h3>") == 1
    assert page.count("It is 3.") == page.count("It is 4.") == 2
    assert "No prompt of this text" in client.get("/compare", params={"q": "only"}).text


def test_one_run_has_no_comparison(run_dirs: list[Path]) -> None:
    client = TestClient(make_page(viewed_runs(run_dirs[:1]), []), base_url="http://127.0.0.1")
    assert client.get("/compare").status_code == 404
    assert "Compare" not in client.get("/").text


def test_runs_of_one_name_are_distinguished(config: Config, tmp_path: Path) -> None:
    paths = [make_run_dir(config, tmp_path / name, 1, 0.5) for name in ("a", "b")]
    assert [run.name for run in viewed_runs(paths)] == ["a", "b"]
    deep = [make_run_dir(config, tmp_path / name / "run", 1, 0.5) for name in ("c", "d", "c/run")]
    assert [run.name for run in viewed_runs(deep[:2])] == ["c", "d"]
    assert len({run.name for run in viewed_runs([*deep, paths[0]])}) == 4


def test_what_cannot_be_compared_is_refused(run_dirs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is given twice"):
        viewed_runs([run_dirs[0], tmp_path / "b" / ".." / "a"])
    with pytest.raises(InputError, match="is not a run directory"):
        viewed_runs([run_dirs[0], tmp_path])
    with pytest.raises(InputError, match=f"at most {MAX_RUNS}"):
        viewed_runs(run_dirs * 4)
