"""The first page of `gspo view`: verdict, curves, and how it follows a run, from logs of the learner's RunDir."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from gspo.cli.monitor.service_states import service_states
from gspo.common.config.loading import CONFIG_NAME, write_config
from gspo.common.config.schema import Config
from gspo.common.network.http_server import HttpServer
from gspo.common.telemetry.findings import Finding
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding
from gspo.learner.storage.run_directory import RunDir
from gspo.runlog.checks import write_checks
from gspo.runlog.pushes import PushRecord
from gspo.runlog.token_ledger import LedgerRecord
from gspo.view.comparison import compared_curves, compared_results
from gspo.view.http_api import make_page
from gspo.view.picture.plots import PLOTS
from gspo.view.picture.viewed_run import ViewedRun
from tests.unit.view.test_report import evaluate, train

_DEADLINE_S = 20


@pytest.fixture
def run_dir(config: Config, tmp_path: Path) -> Path:
    """A run of ten steps in which one group was stale."""
    write_config(config, tmp_path / CONFIG_NAME)
    with RunDir(tmp_path) as run:
        run.append_version(0, "digest-0", "float32")
        evaluate(run, 0, 0.35)
        train(run, 1, 10)
        evaluate(run, 10, 0.6)
        run.settle([EndedGroup(44, GroupEnding.STALE, "too old")])
        tokens = {"generated": 1500, "trained": 1400, "masked_failed": 90, "in_flight": 10, "evaluation": 70}
        refused = PushRecord(version=9, unix_s=0.0, changes=2, bytes=2_500_000, failures=1, reason="refused <b>")
        run.append_pushes(
            [refused, PushRecord(version=10, unix_s=0.0, full=1, changes=1, bytes=9_000_000, longest_s=1.5)]
        )
        run.append_ledger(LedgerRecord(step=10, unix_s=0.0, account="a", tokens=tokens))
    return tmp_path


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    return TestClient(make_page([ViewedRun("named <i>", run_dir, service_states)], []), base_url="http://127.0.0.1")


def test_the_page_begins_with_what_bounds_the_run(client: TestClient) -> None:
    text = " ".join(client.get("/").text.split())
    assert "The last steps were bound by <b>training</b>" in text
    assert text.index("What bounds it") < text.index("Held-out results") < text.index("Curves")
    assert "<b>0.350 ± 0.030 → 0.600 ± 0.030</b>" in text
    assert '<th scope="row">trained</th><td>40</td>' in text
    assert '<th scope="row">stale</th><td>1</td>' in text
    assert '<th scope="row">open</th><td>4</td>' in text
    assert '<th scope="row">issued</th><td>45</td>' in text
    assert "named &lt;i&gt;" in text
    assert "no end is recorded" in text
    assert "data-open" in text, "the page follows the run"


def test_the_page_says_what_became_of_the_tokens(client: TestClient, run_dir: Path) -> None:
    text = " ".join(client.get("/").text.split())
    assert '<th scope="row">generated</th><td>1,500</td><td>100.0 %</td>' in text
    assert '<th scope="row">masked failed</th><td>90</td><td>6.0 %</td>' in text
    assert '<th scope="row">difference</th><td>0</td>' in text
    assert "As of step 10; 70 more for evaluations." in text
    with RunDir(run_dir) as run:
        run.append_ledger(LedgerRecord(step=11, unix_s=0.0, account="a", tokens={"generated": 1500, "trained": 1490}))
        train(run, 11, 11)
    text = client.get("/").text
    assert "the columns have 10 tokens less than were generated: some were lost" in text


def test_the_page_shows_the_pushes_of_the_newest_versions(client: TestClient) -> None:
    text = " ".join(client.get("/").text.split())
    ten = '<th scope="row">10</th><td>1</td><td>1</td><td>9.0</td><td>1.50 s</td><td>0</td>'
    nine = '<th scope="row">9</th><td>0</td><td>2</td><td>2.5</td><td>0.00 s</td><td>1: refused &lt;b&gt;</td>'
    assert text.index(ten) < text.index(nine)
    assert "1 pushes of the run failed" in text


def test_a_finding_of_the_start_stays_and_no_caption_denies_it(config: Config, tmp_path: Path) -> None:
    write_config(config, tmp_path / CONFIG_NAME)
    with RunDir(tmp_path) as run:
        train(run, 1, 2, clipped_sequences=0.1)
    (tmp_path / "log/evaluations.jsonl").write_text(
        "".join(
            json.dumps({"version": n, "step": n, "unix_s": 1.0 + n, "figures": {"sampled_mean": 0.2, "num_prompts": 4}})
            + "\n"
            for n in (0, 2)
        )
    )
    client = TestClient(make_page([ViewedRun("run", tmp_path)], []), base_url="http://127.0.0.1")
    assert "prompts never trained on" in client.get("/").text
    write_checks(tmp_path / "log", [Finding("held_out_in_training", "4 of 4 prompts <b>", tries=("other ones",))])
    text = TestClient(make_page([ViewedRun("run", tmp_path)], []), base_url="http://127.0.0.1").get("/").text
    assert "<b>held_out_in_training</b>: 4 of 4 prompts &lt;b&gt;." in text and "Try other ones" in text
    assert "prompts never trained on" not in text and "some are also trained on" in text


def test_findings_link_the_first_and_the_last_step_of_each(config: Config, tmp_path: Path) -> None:
    write_config(config, tmp_path / CONFIG_NAME)
    client = TestClient(make_page([ViewedRun("run", tmp_path)], []), base_url="http://127.0.0.1")
    with RunDir(tmp_path) as run:
        train(run, 1, 10, clipped_sequences=0.1)
        assert "No rule on learning had a finding" in client.get("/").text
        train(run, 11, 22, noise_share=0.4, clipped_sequences=0.5)
        # The finding is of the newest five measurements: it begins with the third that is high.
        train(run, 23, 25, noise_share=0.0, clipped_sequences=0.5)
    text = " ".join(client.get("/").text.split())
    findings = text[text.index('id="findings"') : text.index("</section>", text.index('id="findings"'))]
    noise, clip = (next(item for item in findings.split("<p>") if words in item) for words in ("alone", "lost"))
    assert (
        'First at <a href="/rollouts?step=13">step 13</a>, last at <a href="/rollouts?step=24">step 24</a>, 12' in noise
    )
    assert ' steps in all. <a href="/rollouts?step=24">Rollouts</a>' in noise
    assert "generation.dtype" in noise or "old_logprobs: recompute" in noise, "each has its fix"
    assert 'First at <a href="/rollouts?step=20">step 20</a>' in clip, "the tenth such step"
    assert client.get("/rollouts?step=20").status_code == 200


def test_the_page_says_what_each_service_did_last(client: TestClient, run_dir: Path) -> None:
    assert 'id="services"' not in client.get("/").text
    (run_dir / "services").mkdir()
    (run_dir / "services" / "reward-0.log").write_text('{"event": "bad_input", "reason": "<script>"}\n')
    text = " ".join(client.get("/").text.split())
    assert '<th scope="row">reward-0</th><td></td><td class="what">bad input: &lt;script&gt;</td>' in text
    assert "No service of the run has a heartbeat. These are the last records in their logs" in text


def test_a_run_without_a_step_has_a_page(config: Config, tmp_path: Path) -> None:
    write_config(config, tmp_path / CONFIG_NAME)
    (tmp_path / "log").mkdir()
    client = TestClient(make_page([ViewedRun("new", tmp_path)], []), base_url="http://127.0.0.1")
    assert "Too few steps" in client.get("/").text
    assert client.get("/api/curves").json() == []


def test_curves_are_those_of_the_report_over_the_steps(client: TestClient) -> None:
    curves = {curve["name"]: curve for curve in client.get("/api/curves").json()}
    assert list(dict.fromkeys(name.partition("-")[0] for name in curves)) == [
        plot.name for plot in PLOTS if plot.name in curves
    ]
    assert curves["entropy"]["steps"] == list(range(1, 11))
    assert curves["entropy"]["lines"][0]["values"] == pytest.approx([0.8 - 0.01 * step for step in range(1, 11)])
    reward = curves["reward"]
    assert reward["steps"] == list(range(11))
    by_figure = {line["figure"]: line["values"] for line in reward["lines"]}
    assert by_figure["sampled_mean"] == [0.35, *[None] * 9, 0.6]
    assert by_figure["reward_mean"][0] is None
    assert None not in by_figure["reward_mean"][1:]
    assert all(curve["question"] and curve["reading"] for curve in curves.values())


def test_a_figure_that_is_not_finite_is_a_gap(run_dir: Path) -> None:
    with RunDir(run_dir) as run:
        train(run, 11, 11, entropy=math.nan)
    (entropy,) = (curve.as_json() for curve in ViewedRun("run", run_dir).curves() if curve.name == "entropy")
    assert entropy["lines"][0]["values"][-1] is None
    json.dumps(entropy, allow_nan=False)


def test_only_the_files_of_the_page_are_served(client: TestClient) -> None:
    for path in ("/style.css", "/curves.js", "/uplot/uPlot.iife.min.js", "/uplot/uPlot.min.css"):
        assert client.get(path).status_code == 200
    for path in ("/run.html", "/uplot/LICENSE", "/config.yaml", "/uplot/..%2f..%2fhttp_api.py"):
        assert client.get(path).status_code == 404
    assert "script-src 'self'" in client.get("/").headers["content-security-policy"]


async def test_the_stream_tells_of_new_steps_and_does_not_hold_the_server(run_dir: Path) -> None:
    run = ViewedRun("run", run_dir)
    assert len(run.curves()[1].steps) == 10
    server = HttpServer(make_page([run], []), "127.0.0.1", 0)
    serving = asyncio.create_task(server.run())
    async with (
        asyncio.timeout(_DEADLINE_S),
        httpx.AsyncClient(timeout=_DEADLINE_S) as http,
        http.stream("GET", f"http://{server.address}/api/changes") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        assert await anext(lines) == ": follows the log"
        with RunDir(run_dir) as log:
            train(log, 11, 11)
        while not (line := await anext(lines)).startswith("data:"):
            assert not line
        assert line == "data: changed"
        assert run.curves()[1].steps[-1] == 11
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


def compared(config: Config, folder: Path, figures: dict[str, float], digest: str, **of_steps: float) -> ViewedRun:
    """A run of ten steps with these figures, and with a held-out file of this digest."""
    evaluation = config.evaluation.model_copy(update={"prompts": Path("e.jsonl")})
    folder.mkdir()
    write_config(config.model_copy(update={"evaluation": evaluation}), folder / CONFIG_NAME)
    with RunDir(folder) as run:
        evaluate(run, 0, 0.6, "")
        train(run, 1, 10, **of_steps)
        evaluate(run, 10, 0.6, "", **figures)
    record = {"unix_s": 0.0, "step": 0, "digests": {"evaluation.prompts": {"e.jsonl": digest}}, "changes": []}
    (folder / "data_files.jsonl").write_text(json.dumps(record) + "\n")
    return ViewedRun(folder.name, folder)


def test_captions_of_a_comparison_speak_of_drawn_lines_alone(config: Config, tmp_path: Path) -> None:
    first = compared(config, tmp_path / "first", {"num_prompts": 50.0}, "a" * 64)
    same = compared(config, tmp_path / "same", {"num_prompts": 50.0}, "a" * 64)
    other = compared(config, tmp_path / "other", {"num_prompts": 16.0}, "b" * 64)
    curves = {curve.name: curve for curve in compared_curves([first, same])}
    assert "can be compared: all are of the same prompts" in curves["held_out"].reading
    assert "held-out points" not in curves["reward"].reading and "training line jumps" in curves["reward"].reading
    assert "dashed lines" not in curves["log_ratio"].reading and "in the bars" not in curves["clip"].reading
    assert curves["clip"].lines[0].figure == "clipped_sequences_low + clipped_sequences_high"
    assert curves["clip"].lines[0].values[2] == pytest.approx(0.3 + 0.1 * math.sin(2))
    (held_out,) = (curve for curve in compared_curves([first, other]) if curve.name == "held_out")
    assert "all are of the same prompts" not in held_out.reading
    assert "those of another line need not be" in held_out.reading
    assert held_out.question == "Is it better on held-out prompts (e.jsonl)?"
    of_report = {curve.name: curve.reading for curve in first.curves()}
    assert "Outside the dashed lines" in of_report["log_ratio"] and "in the bars" in of_report["clip"]


def test_a_comparison_has_a_curve_of_each_source_and_of_each_k(config: Config, tmp_path: Path) -> None:
    sources = {f"source_{name}/reward_mean": 0.5 for name in ("sums", "words")}
    runs = [compared(config, tmp_path / name, {}, "a" * 64, **sources) for name in ("first", "second")]
    curves = compared_curves(runs)
    questions = [curve.question for curve in curves if curve.question.startswith("Which task gets better?")]
    assert questions == ["Which task gets better? (sums)", "Which task gets better? (words)"]
    assert [curve.axis.label for curve in curves if "pass@4" in curve.axis.label] == ["share of prompts, pass@4"]
    assert all([line.label for line in curve.lines] == ["first", "second"] for curve in curves)


def test_a_comparison_has_differences_with_errors_of_the_same_prompts_alone(config: Config, tmp_path: Path) -> None:
    runs = [
        compared(config, tmp_path / "first", {}, "a" * 64),
        compared(config, tmp_path / "near", {"sampled_mean": 0.65}, "a" * 64),
        compared(config, tmp_path / "far", {"sampled_mean": 0.9}, "a" * 64),
        compared(config, tmp_path / "other", {"sampled_mean": 0.9}, "b" * 64),
    ]
    ((file, rows),) = compared_results(runs)
    assert (file, [name for name, _, _ in rows]) == ("e.jsonl", ["first", "near", "far", "other"])
    assert rows[0][1] == "sampled 0.600 ± 0.030, greedy 0.700 ± 0.040, pass@4 0.725 at version 10"
    assert [change for _, _, change in rows] == [
        "",
        "no difference beyond two standard errors",
        "+0.300 ± 0.042",
        "other prompts, or not known to be the same",
    ]
