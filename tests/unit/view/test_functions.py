"""The functions of a run on its page: scores by version over steps, calls, sources, differences, hostile texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gspo.learner.assembly.rows import row_from_scored
from gspo.learner.storage.step_log import StepLog
from gspo.runlog.function_files import FunctionCalls, FunctionSource, write_calls, write_source
from gspo.runlog.step_files import step_file
from gspo.view.function_versions import DifferenceLine, RunFunctions, difference_of, function_curves
from gspo.view.http_api import make_page
from gspo.view.log_query import LogQuery
from gspo.view.picture.viewed_run import ViewedRun
from tests.unit.learner.conftest import MakeScored

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"
OLD, NEW = "aa" * 32, "bb" * 32
# step -> (version, value of each rollout; None is a failure)
SCORES = {1: (OLD, (0.0, 1.0)), 2: (OLD, (1.0, None)), 3: (NEW, (0.5, 0.25))}


def part(value: float, version: str, name: str = "exact", weight: float = 2.0) -> dict[str, object]:
    return {"name": name, "value": value, "weight": weight, "version": version}


@pytest.fixture
def run_dir(tmp_path: Path, scored: MakeScored) -> Path:
    (tmp_path / "log").mkdir()
    log = StepLog(tmp_path / "log")
    for step, (version, values) in SCORES.items():
        rows = []
        for number, value in enumerate(values):
            row = replace(row_from_scored(scored(step, number)), step=step, reward_version=version)
            if value is None:
                row = replace(row, reward=None, parts_json="[]", failure="exact: took longer than 1 s")
            else:
                # The length penalty has no function, and a function may have named parts.
                parts = [part(value, version, "exact/a"), part(1.0, version, "exact/b", 0.0), part(-1.0, "", "length")]
                row = replace(row, parts_json=json.dumps(parts))
            rows.append(row)
        log.write(step, rows)
    source = FunctionSource(
        name="exact", version=OLD, kind="reward", filename=f"{HOSTILE}.py", entry="", source="a = 1\nb = 2\n",
        args={"x": HOSTILE}, is_tryable=True, reads=[], used_unix_s=1.0,
    )  # fmt: skip
    write_source(tmp_path / "log", source)
    write_source(tmp_path / "log", replace(source, version=NEW, source=f"a = 1\n# {HOSTILE}\nb = 3\n", used_unix_s=2.0))
    failure = {"unix_s": 1.0, "kind": "timeout", "text": HOSTILE, "traceback": HOSTILE, "output": HOSTILE}
    calls = FunctionCalls("exact", OLD, 4, 10, 0.5, {"timeout": 3}, HOSTILE, failure)
    write_calls(tmp_path / "log", "p", [calls])
    return tmp_path


@pytest.fixture
def functions(run_dir: Path) -> RunFunctions:
    return RunFunctions(LogQuery(run_dir / "log"), run_dir / "log")


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    page = make_page([ViewedRun("small", run_dir)], [])
    return TestClient(page, base_url="http://127.0.0.1:8090", raise_server_exceptions=True)


def test_versions_have_their_scores_failures_and_times(functions: RunFunctions) -> None:
    old, new = functions.versions()
    assert (old.version, old.answers, old.num_failed, old.steps) == (OLD, 3, 1, [1, 2])
    assert old.mean == pytest.approx(4 / 3)
    assert old.seconds == pytest.approx(0.05)
    assert (new.version, new.answers, new.mean, new.num_failed, new.calls) == (NEW, 2, 0.75, 0, None)


def test_a_step_counts_from_its_appearance_to_its_end(functions: RunFunctions, run_dir: Path) -> None:
    assert functions.versions()[1].answers == 2
    log = StepLog(run_dir / "log")
    log.write(4, [replace(row, step=4) for row in log.read(3)])
    assert functions.versions()[1].answers == 4
    step_file(run_dir / "log", 4).unlink()
    assert functions.versions()[1].answers == 2


def test_curves_have_a_line_for_each_version(functions: RunFunctions) -> None:
    score, failures = (curve.as_json() for curve in function_curves(functions.versions()))
    assert score["steps"] == [1, 2, 3]
    assert [(line["label"], line["values"]) for line in score["lines"]] == [
        (OLD[:12], [1.0, 2.0, None]),
        (NEW[:12], [None, None, 0.75]),
    ]
    assert failures["is_share"]
    assert failures["lines"][0]["values"] == [0.0, 0.5, None]


def test_a_difference_has_the_lines_and_numbers_of_both() -> None:
    lines = difference_of("a\nb\nc\n", "a\nx\nc\n")
    assert lines == [
        DifferenceLine(" ", 1, 1, "a"),
        DifferenceLine("-", 2, None, "b"),
        DifferenceLine("+", None, 2, "x"),
        DifferenceLine(" ", 3, 3, "c"),
    ]
    assert difference_of("same", "same") == []
    far = difference_of("\n".join(map(str, range(50))), "\n".join(["x", *map(str, range(1, 49)), "y"]))
    assert [line.sign for line in far].count("…") == 1
    assert len(far) < 20


@pytest.mark.parametrize(
    "path", ["/functions", f"/functions/{OLD}", f"/functions/{NEW}", f"/functions/{NEW}/against/{OLD}"]
)
def test_hostile_sources_and_outputs_are_harmless(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text
    assert not {"\u202e", "\x1b"} & set(answer.text)
    if path != "/functions":
        assert "⟦U+202E⟧" in answer.text or "\\u202e" in answer.text


def test_a_rollout_links_the_source_of_its_version(client: TestClient) -> None:
    assert f'href="/functions/{NEW}"' in client.get("/steps/3/groups/3/0").text
    text = client.get(f"/functions/{NEW}").text
    assert 'id="line-3"' in text
    assert f'href="/functions/{NEW}/against/{OLD}"' in text


def test_a_version_without_source_says_so(client: TestClient, run_dir: Path) -> None:
    (run_dir / "log" / "functions" / f"source-{OLD}.json").unlink()
    assert "has no source of this version" in client.get(f"/functions/{OLD}").text
    assert client.get(f"/functions/{NEW}/against/{OLD}").status_code == 404
    assert client.get(f"/functions/{'cc' * 32}").status_code == 404
    assert client.get("/functions/..%2f..%2fsecret").status_code in (404, 422)


def test_a_log_without_functions_is_a_page(client: TestClient, run_dir: Path) -> None:
    for path in (run_dir / "log").rglob("*.*"):
        path.unlink()
    assert "names a reward function yet" in client.get("/functions").text
    assert client.get("/api/functions").json() == []
