"""The page of a run over real step files: filters, links, hostile texts, foreign hosts and pages, no other file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest
from starlette.testclient import TestClient

from gspo.common.config.loading import CONFIG_NAME, write_config
from gspo.common.network.http_server import HttpGuard
from gspo.learner.assembly.rows import TokenRecord, row_from_scored
from gspo.learner.storage.step_log import StepLog
from gspo.view.http_api import make_page
from gspo.view.log_query import LogQuery, filter_of
from gspo.view.page_text import coloured_tokens, visible
from gspo.view.picture.viewed_run import ViewedRun
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model
from tests.unit.learner.conftest import MakeScored

HOSTILE = "<script>alert(1)</script>\u202edrow\x1b[31m\x00"


@pytest.fixture
def run_dir(tmp_path: Path, scored: MakeScored) -> Path:
    (tmp_path / "log").mkdir()
    log = StepLog(tmp_path / "log")
    for step in (1, 2):
        rows = [
            replace(
                row_from_scored(scored(10 * step, number, reward=number / 4)),
                step=step,
                advantage=number - 1.5,
                mini_batch=0,
                text=f"{HOSTILE} answer {number}",
                outcome="eos" if number else "truncated",
                columns_json=json.dumps({"answer": "42", HOSTILE: [HOSTILE], "level": 3}),
            )
            for number in range(4)
        ]
        log.write(step, rows)
    return tmp_path


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    page = make_page([ViewedRun("small <b>", run_dir)], [make_tiny_model(run_dir / "model")])
    return TestClient(HttpGuard(page, ["127.0.0.1"]), base_url="http://127.0.0.1:8090")


def test_rollouts_are_filtered_sorted_and_linked(client: TestClient) -> None:
    text = client.get("/rollouts").text
    assert "8 rollouts" in text
    assert "/steps/2/groups/20/3" in text
    assert "exact 0.75" in text, "the parts of the reward"
    text = client.get("/rollouts?step=1&reward_min=0.5&sort=reward&dir=asc&generator=").text
    assert "2 rollouts" in text
    assert text.index("/steps/1/groups/10/2") < text.index("/steps/1/groups/10/3")
    assert "2 rollouts" in client.get("/rollouts", params={"outcome": "truncated"}).text
    assert "2 rollouts" in client.get("/rollouts", params={"q": "answer 2"}).text
    assert "0 rollouts" in client.get("/rollouts", params={"q": "' OR true --"}).text


def test_prompt_answer_right_answer_and_reward_stand_in_a_row(client: TestClient) -> None:
    row = next(row for row in client.get("/rollouts").text.split("<tr>") if "/steps/2/groups/20/3" in row)
    cells = [" ".join(cell.split()) for cell in row.split("<td")]
    assert "answer 3" in cells[5] and "answer <bdi>42</bdi>" in cells[6] and "level <bdi>3</bdi>" in cells[6]
    assert cells[7] == ">0.75</td>"
    for path in ("/steps/2/groups/20", "/steps/2/groups/20/3"):
        assert '<tr><th scope="row">answer</th><td class="prompt"><bdi>42</bdi></td></tr>' in client.get(path).text
    page = client.get("/steps/2/groups/20/3").text
    assert 'rel="prev" href="/steps/2/groups/20/2"' in page and 'rel="next"' not in page
    assert 'rel="next" href="/steps/2/groups/20/1"' in client.get("/steps/2/groups/20/0").text


def test_a_group_says_why_it_shows_no_clip(client: TestClient, run_dir: Path) -> None:
    assert "the configuration cannot be read" in client.get("/steps/1/groups/10").text
    write_config(make_run(run_dir, run_dir / "model"), run_dir / CONFIG_NAME)
    assert "its step has no token records" in client.get("/steps/1/groups/10").text
    log = StepLog(run_dir / "log")
    row = log.read(1)[1]
    entropy = np.zeros(len(row.token_ids), np.float32)
    log.write_tokens(1, [TokenRecord(row.group, row.number, row.logp + np.float32(0.5), entropy)])
    text = " ".join(client.get("/steps/1/groups/10").text.split())
    assert "Clip: ratio exp(+0.5), above the clip" in text
    assert text.count("its step has no token records") == 3, "the other answers have no record"


@pytest.mark.parametrize("query", ["step=x", "reward_min=nan", "sort=text", "page=0", "page=99999999999999999999"])
def test_a_bad_value_is_refused_with_its_key(client: TestClient, query: str) -> None:
    answer = client.get(f"/rollouts?{query}")
    assert answer.status_code == 400
    assert f"{query.partition('=')[0]} is" in answer.text


@pytest.mark.parametrize(
    "path", ["/", "/rollouts", "/steps/1/groups/10", "/steps/1/groups/10/1", "/steps/1/groups/10/1?colour=mask"]
)
def test_hostile_texts_are_harmless(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert "<script>" not in answer.text
    assert "small &lt;b&gt;" in answer.text
    assert not {"\u202e", "\x1b", "\x00"} & set(answer.text)
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'self'")
    if "groups" in path:
        assert "⟦U+202E⟧" in answer.text


def test_a_long_text_is_cut_with_a_link_to_the_whole(client: TestClient, run_dir: Path) -> None:
    log = StepLog(run_dir / "log")
    log.write(3, [replace(log.read(1)[0], step=3, text="long " * 400_000)])
    page = client.get("/steps/3/groups/10")
    assert len(page.text) < 20_000
    assert "/steps/3/groups/10/0/text" in page.text
    whole = client.get("/steps/3/groups/10/0/text")
    assert whole.headers["content-type"].startswith("text/plain")
    assert len(whole.text) == 2_000_000


def test_other_hosts_pages_and_methods_are_refused(client: TestClient) -> None:
    assert client.get("/", headers={"host": "attacker.example"}).status_code == 421
    assert client.get("/", headers={"origin": "http://attacker.example"}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status_code == 403
    assert client.post("/", json={}).status_code == 405
    assert client.get("/openapi.json").status_code == 404


def test_missing_rollouts_and_an_empty_log_are_pages(client: TestClient, run_dir: Path) -> None:
    for path in ("/steps/9/groups/10", "/steps/1/groups/10/9", "/steps/1/groups/10/1/token_ids"):
        assert client.get(path).status_code == 404
    for file in (run_dir / "log").iterdir():
        file.unlink()
    assert "0 rollouts" in client.get("/rollouts").text


def test_duckdb_reads_the_log_alone(run_dir: Path) -> None:
    (run_dir / "secret.json").write_text(json.dumps({"token": 1}))
    query = LogQuery(run_dir / "log")
    assert query.rollouts(filter_of({}))[0] == 8
    for sql in (f"FROM read_json('{run_dir}/secret.json')", "SET enable_external_access = true"):
        with pytest.raises(duckdb.Error):
            query._connection.execute(sql)


def test_tokens_have_a_shade_for_log_prob_version_and_mask() -> None:
    row = {
        "token_ids": [1, 2, 3],
        "logp": np.log([0.95, 0.3, 1.0]).tolist(),
        "version": [7, 4, -1],
        "mask": [True, False, False],
    }
    shades = {
        colour: [token["shade"] for token in coloured_tokens(row, colour, 0, None)]
        for colour in ("logp", "version", "mask")
    }
    assert shades == {
        "logp": ["shade-0", "shade-2", "context"],
        "version": ["shade-0", "shade-3", "context"],
        "mask": ["shade-0", "context", "context"],
    }
    assert visible("a\nb\u2066") == "a\nb⟦U+2066⟧"


def test_token_records_colour_by_ratio_and_entropy(client: TestClient, run_dir: Path) -> None:
    path = "/steps/1/groups/10/1"
    assert "colour=ratio" not in client.get(path).text
    refused = client.get(f"{path}?colour=ratio")
    assert refused.status_code == 404
    assert "learner.token_records" in refused.text
    log = StepLog(run_dir / "log")
    row = log.read(1)[1]
    ratio = np.array([1.0, 1.5, 3.0], np.float32)[: len(row.token_ids)]
    entropy = np.array([0.05, 0.7, 9.0], np.float32)[: len(row.token_ids)]
    log.write_tokens(1, [TokenRecord(row.group, row.number, (row.logp + np.log(ratio)).astype(np.float32), entropy)])
    shown = [name for name, counts in zip(("shade-0", "shade-3", "shade-4"), row.mask, strict=False) if counts]
    text = client.get(f"{path}?colour=ratio").text
    assert all(f'class="{name}" title="id' in text for name in shown)
    assert "ratio 1.500 · entropy 0.700" in text
    assert "within a factor of 2" in text
    assert 'class="shade-2" title="id' in client.get(f"{path}?colour=entropy").text
    assert client.get("/steps/1/groups/10/2?colour=entropy").status_code == 404, "that rollout has no record"
