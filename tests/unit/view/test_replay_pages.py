"""The pages of replays from results as `gspo replay` writes them, and from files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gspo.view.http_api import make_page
from gspo.view.picture.replay_results import REPLAYS, RESULT_NAME
from gspo.view.picture.viewed_run import ViewedRun


def value(recorded: Any, replayed: Any, *, equal: bool | None) -> dict[str, Any]:
    is_number = isinstance(recorded, float) and isinstance(replayed, float)
    difference = replayed - recorded if is_number else None
    return {"recorded": recorded, "replayed": replayed, "difference": difference, "equal": equal}


def result(**changes: Any) -> dict[str, Any]:
    """Steps 3 and 4 again; the second one differs in its digest, its loss and its entropy."""
    first = {"digest": value("aa", "aa", equal=True), "loss": value(0.25, 0.25, equal=True)}
    second = {
        "digest": value("bb", "cc", equal=False),
        "loss": value(0.25, 0.5, equal=False),
        "grad_norm": value(1.5, None, equal=None),
        "entropy<b>": value(1.0, 2.0, equal=False),
    }
    whole = {
        "run": "r", "folder": "f", "first": 3, "last": 4, "start": 2, "with": {}, "exact": True, "rounding": [],
        "notes": [], "equal": False, "first_difference": {"step": 4, "name": "digest"}, "plot": None,
        "steps": [{"step": 3, "values": first}, {"step": 4, "values": second}],
    }  # fmt: skip
    return {**whole, **changes}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    (tmp_path / "log").mkdir()
    page = make_page([ViewedRun("run", tmp_path)], [])
    return TestClient(page, base_url="http://127.0.0.1")


def write(run_dir: Path, name: str, text: str) -> None:
    folder = run_dir / REPLAYS / name
    folder.mkdir(parents=True)
    (folder / RESULT_NAME).write_text(text)


def test_a_result_is_beside_the_record(client: TestClient, tmp_path: Path) -> None:
    assert "gspo replay RUN_DIR" in client.get("/replays").text
    write(tmp_path, "steps-3-4", json.dumps(result()))
    listed = client.get("/replays").text
    assert '<a href="/replays/steps-3-4">' in listed
    assert "differs from step 4, digest" in listed
    text = " ".join(client.get("/replays/steps-3-4").text.split())
    assert '<th scope="row">3</th> <td>equal</td> <td>0.25</td><td>0.25</td><td>0</td>' in text
    assert '<b class="failure">differs</b></td> <td>0.25</td><td>0.5</td><td>+0.25</td>' in text
    assert "<td>1.5</td><td>none</td><td></td>" in text
    assert '<td class="prompt">entropy&lt;b&gt;</td>' in text
    curves = {curve["name"]: curve for curve in client.get("/api/replays/steps-3-4").json()}
    assert list(curves) == ["loss", "grad_norm"]
    assert curves["loss"]["steps"] == [3, 4]
    assert [line["values"] for line in curves["loss"]["lines"]] == [[0.25, 0.25], [0.25, 0.5]]
    assert [line["values"] for line in curves["grad_norm"]["lines"]] == [[1.5], [None]]


def test_other_keys_are_named(client: TestClient, tmp_path: Path) -> None:
    write(tmp_path, "steps-3-4-0a1b", json.dumps(result(**{"with": {"algorithm.pg_clip_high": 0.001}})))
    assert "algorithm.pg_clip_high=0.001" in client.get("/replays").text
    assert "From step 3 on it trained with" in client.get("/replays/steps-3-4-0a1b").text


@pytest.mark.parametrize("text", ["", "{}", '{"first": "<script>"}', json.dumps(result(steps=[{"step": 1}]))])
def test_a_file_that_is_no_result_is_named_with_the_reason(client: TestClient, tmp_path: Path, text: str) -> None:
    write(tmp_path, "broken", text)
    write(tmp_path, "steps-3-4", json.dumps(result()))
    listed = client.get("/replays")
    assert listed.status_code == 200
    assert '<td>broken</td>\n<td colspan="3" class="failure">' in listed.text
    assert "/replays/steps-3-4" in listed.text
    assert client.get("/replays/broken").status_code == 400


def test_only_results_are_read(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result()))
    for name in ("missing", ".hidden", "%2e%2e", "..%2f..%2flog"):
        assert client.get(f"/replays/{name}").status_code in (404, 422)
