"""The sections of docs/benchmarks.md: the tables of made-up results, by numbers worked by hand, and the whole page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks import DOCS
from benchmarks.__main__ import SECTIONS, app
from benchmarks.engine.draft_rates import DRAFTS
from benchmarks.engine.token_rate import ENGINE
from benchmarks.gateway.overhead import GATEWAY
from benchmarks.harness.page import GENERATED, write_page
from benchmarks.harness.section import PageSection
from benchmarks.harness.tables import side_by_side, table
from benchmarks.learner.logprobs import LOGPROBS
from benchmarks.pipeline.many_generators import GENERATORS
from benchmarks.pipeline.rollout_rate import PIPELINE, quarters
from benchmarks.push.weight_update import PUSH
from benchmarks.reward.sandbox_cost import REWARD
from benchmarks.system.curriculum_share import CURRICULUM
from benchmarks.system.lag import LEARNING
from benchmarks.system.startup import START
from benchmarks.system.step_rate import SYSTEM, floors
from benchmarks.system.window import CounterSnapshot, between, idle_share
from benchmarks.tails.long_answers import TAIL, rates_alone
from benchmarks.view.page_time import VIEW

MIB = 2**20
Cases = dict[str, list[dict[str, Any]]]
ENGINES: Cases = {
    "engine": [
        {"settings": name, "lengths": "fixed", "dtype": "float32", "start_s": 30.0, **measured}
        for name, measured in (
            ("defaults", {"seconds": 4.0, "tokens_per_s": 8000.0}),
            ("ours", {"seconds": 5.0, "tokens_per_s": 6400.0}),
            ("service", {"seconds": 3.0, "tokens_per_s": 6000.0}),
        )
    ],
    "learner": [
        {"lengths": "fixed", "dtype": "float32", "threads": "service", "seconds": 3.5},
        {"lengths": "fixed", "dtype": "float32", "threads": "spinning", "seconds": 3.0},
    ],
}
SERVICES = ("coordinator", "generation", "reward", "learner")
STEP: dict[str, Any] = {
    "max_lag": 1,
    "lengths": "fixed",
    "dtype": "float32",
    "seconds": 8.75,
    "seconds_each": [8.5, 9.0],
    "tokens_per_s": 3700.0,
    "tokens_generated": 330.0,
    "tokens_trained": 300.0,
    "answer_tokens": {"median": 128, "mean": 128.0, "max": 128},
    "idle_share": dict.fromkeys(SERVICES, 0.5),
    "processor_share": {**dict.fromkeys(SERVICES, 0.25), "redis": 0.01, "gspo run": 0.02},
    "machine_idle_cores": 0.125,
    "first_rollout_s": 61.0,
    "figures": {"wait_s": 1.0, "log_s": 0.5, "train_s": 7.0, "publish_s": 0.25},
    "pushes": [{"push_s": s, "stall_s": s / 2, "bytes": 5 * MIB} for s in (0.1, 0.2, 0.9)],
}


def tables(section: PageSection, results: Cases) -> list[list[list[str]]]:
    """Header and rows of each table of a section, cell by cell."""
    blocks = [block.splitlines() for block in section.text(results).split("\n\n") if block.strip().startswith("|")]
    return [
        [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in [lines[0], *lines[2:]]]
        for lines in ([line for line in block if line] for block in blocks)
    ]


def test_a_table_has_a_dash_for_a_missing_value() -> None:
    assert table(("", ["x"], ""), ("a", [12345.67], ",.1f"), ("b", [None], ".0%")) == (
        "|  | a | b |\n| --- | ---: | ---: |\n| x | 12,345.7 | - |"
    )
    assert side_by_side(([1.0, float("nan")], ".0f"), ([2.0, 3.0], ".1f"), separator=" to ") == ["1 to 2.0", "- to 3.0"]


def test_the_service_is_compared_with_bare_vllm() -> None:
    (rates,) = tables(ENGINE, ENGINES)
    assert rates[-1] == ["our service, fixed, float32", "6,000", "3.00", "75%", "94%", "30"]
    assert rates[1][3:5] == ["-", "-"]


def test_an_engine_with_drafts_is_compared_with_one_without() -> None:
    rate = {"temperature": 0.1, "in_flight": 8, "tokens_per_s": [[1000.0, 2000.0], [2000.0, 3000.0], [1000.0, 1000.0]]}
    cases = [{"rounds": 3, "rates": [rate | {"accepted_share": 0.75}, rate | {"accepted_share": None}]}]
    ((_, some, none),) = tables(DRAFTS, {"drafts": cases})
    assert some == ["0.1", "8", "1,000", "2,000", "1.50", "1.00 to 2.00", "75%"]
    assert none[-1] == "-"


def test_a_step_is_compared_with_the_fastest_engine_and_learner_alone() -> None:
    assert floors(ENGINES).loc[("fixed", "float32")].to_dict() == {"vLLM alone": 4.0, "learner alone": 3.0}
    times, shares, pushes = tables(SYSTEM, ENGINES | {"system": [STEP]})
    assert times[1][1:] == ["8.75", "8.5 to 9.0", "3,700", "7.00", "125%", "1.10", "128, 128, 128"]
    assert shares[1][1:] == ["50%, 25%"] * 4 + ["1%", "2%", "0.12"]
    assert pushes[1][1:] == ["0.200", "0.100", "5.0", "61", "1.00", "0.50", "7.00", "0.25"]
    assert tables(SYSTEM, {"system": [STEP]})[0][1][4:6] == ["-", "-"]


def test_chunked_log_probs_are_compared_with_plain_ones() -> None:
    ways = {"plain": {"seconds": 32.0, "peak_bytes": 7 * 2**30}, "chunked": {"seconds": 33.6, "peak_bytes": 2**30}}
    case = {"vocabulary": 151_936, "tokens": 4096, "width": 1024, "ways": ways}
    ((_, plain, chunked),) = tables(LOGPROBS, {"logprobs": [case]})
    assert plain[1:] == ["32.0", "1.00", "7.00", "1.00"]
    assert chunked[1:] == ["33.6", "1.05", "1.00", "0.14"]


def test_accuracies_are_compared_at_equal_steps_and_at_equal_times() -> None:
    def case(old_logprobs: str, seconds: float) -> dict[str, Any]:
        points = ((0, 0.0, 0.2), (10, seconds / 2, 0.4), (20, seconds, 0.8))
        curve = [{"step": step, "seconds": s, "accuracy": accuracy, "stderr": 0.02} for step, s, accuracy in points]
        return {"max_lag": 0, "old_logprobs": old_logprobs, "curve": curve, "clipped": [0.1, 0.3]}

    ((header, *rows),) = tables(LEARNING, {"learning": [case("inference", 20.0), case("recompute", 40.0)]})
    assert header[2:6] == ["step 10", "step 20", "10 s", "20 s"]
    assert rows[0][1:] == ["0.200", "0.400", "0.800", "0.400", "0.800", "20", "0.020", "20%"]
    assert rows[1][1:] == ["0.200", "0.400", "0.800", "0.300", "0.400", "40", "0.020", "20%"]


def test_a_curriculum_is_compared_at_equal_tokens() -> None:
    def case(curriculum: str, tokens: float, spread: list[float]) -> dict[str, Any]:
        points = ((0, 0.0, 0.2), (4, tokens, 0.6))
        curve = [{"step": step, "tokens": t, "accuracy": accuracy, "stderr": 0.02} for step, t, accuracy in points]
        tokens_by_step = [tokens * step / 4 for step in range(5)]
        return {"curriculum": curriculum, "num_steps": 4, "tokens": tokens_by_step, "spread": spread, "curve": curve}

    cases = [case("none", 4000.0, [0.25] * 4), case("spread", 2000.0, [0.25, 0.5, 0.75, 1.0])]
    ((_, without, with_it),) = tables(CURRICULUM, {"curriculum": cases})
    assert without == ["none", "25%", "25%", "25%", "25%", "0.200", "0.250", "0.300", "0.350", "0.400", "0.020"]
    assert with_it == ["spread", "25%", "50%", "75%", "100%", "0.200", "0.300", "0.400", "0.500", "0.600", "0.020"]


def test_processor_times_of_a_start_are_added() -> None:
    used = {"gspo run": 1.0, "coordinator": 2.5, "generation": 9.0, "reward": 1.25, "learner": 4.0}
    case = {"number": 1, "reached_s": {"checked": 4.25, "first answer": 20.0}, "processor_s": used}
    ((_, row),) = tables(START, {"start": [case]})
    assert row == ["start 1", "4.2", "20.0", "1.0", "2.5", "9.0", "1.2", "4.0", "0.0", "17.8"]


def test_the_costs_of_many_generators() -> None:
    case = {"number": 30, "tokens": 10, "parameters": 5, "rollouts": 400, "intake_s": 0.1, "look_s": 0.002}
    text = GENERATORS.text({"generators": [{**case, "first_s": 1.5, "changes_s": 0.25}]})
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("|")][2:] == [
        "2.0",
        "1,500",
        "250",
        "0.25",
    ]


def test_processor_time_in_the_pipeline_is_that_of_one_rollout_over_all_replicas() -> None:
    used = {"coordinator-0": 1.0, "reward-0": 2.0, "learner-0": 6.0, "redis": 3.0}
    used |= dict.fromkeys(("generation-0", "generation-1"), 4.0)
    mib = [0.0, 100.0, 100.0, 110.0, 110.0, 110.0, 110.0, 120.0]
    cases = [
        {"what": "redis", "tokens": 1000, "bytes": 8039, "per_s": 20_000.0},
        {
            "what": "pipeline",
            "replicas": 1,
            "rollouts": 20_000,
            "per_s": 2_000.0,
            "processor_s": used,
            "memory": {"mib": {"reward-0": mib}},
        },
    ]
    rates, memory = tables(PIPELINE, {"pipeline": cases})
    assert rates[1] == ["Redis alone, entries of 8,039 bytes", "20,000", *["-"] * 6]
    # 8 s of two generators over 20,000 rollouts are 0.4 ms.
    assert rates[2][1:] == ["2,000", "0.05", "0.40", "0.10", "0.30", "0.15", "1.00"]
    assert quarters(pd.Series(mib)).tolist() == [100.0, 110.0, 110.0, 120.0]
    assert memory[1:] == [["reward-0", "100", "110", "110", "120", "20%"]]


def test_the_gateway_is_compared_with_vllms_server_pair_by_pair() -> None:
    # The machine was half as fast in the second pair, and gspo alone late in the third.
    figures = (("vllm", (100.0, 50.0, 80.0)), ("gspo", (90.0, 50.0, 40.0)))
    first_s = {"vllm": (0.010, 0.020, 0.010), "gspo": (0.014, 0.030, 0.013)}
    rounds = [
        {
            "clients": 1,
            "pair": pair,
            "server": server,
            "tokens_per_s": rate,
            "first_s": [0.001, first_s[server][pair], 9],
        }
        for server, rates in figures
        for pair, rate in enumerate(rates)
    ]
    ((_, row),) = tables(GATEWAY, {"gateway": [{"model": "small", "parameters": 3_200_000, "rounds": rounds}]})
    assert row == ["3.2 M parameters, 1 client", "80", "50", "0.90", "0.50", "1.00", "10.0", "+4.0"]


def test_the_sandbox_is_compared_with_its_baselines() -> None:
    cases = [
        {"what": "batch", "level": "landlock", "sandbox_s": 0.0005, "in_process_s": 0.0001},
        {"what": "rate", "num_workers": 2, "sandbox_per_s": 3000.0, "pool_per_s": 4000.0},
    ]
    ((_, batch, rate),) = tables(REWARD, {"reward": cases})
    assert batch == ["a batch of 64, median, level landlock", "0.50 ms", "0.10 ms in process", "0.40 ms added"]
    assert rate == ["rate, workers: 2", "3,000 scores/s", "4,000 scores/s of a bare pool", "75% of the pool"]


def test_pushes_are_compared_with_the_transfer_alone_and_grpc_with_tcp() -> None:
    gaps = {"bytes": 2 * MIB, "pack_s": 0.2, "apply_s": 0.1}
    version = {"changed": 0.04, "bytes": 100 * MIB, "digest_s": 0.05, "gaps": gaps}
    pushes = [
        {"rate": 1e-6, "version": number, "push_s": s, "stage_s": s / 2, "stall_s": 0.1, "bytes": size, "share": 1}
        for number, s, size in ((0, 3.0, 100 * MIB), (1, 1.0, 2 * MIB), (2, 1.2, 2 * MIB), (3, 9.0, 2 * MIB))
    ]
    cases: list[dict[str, Any]] = [
        {"kind": "packing", "rate": 1e-6, "parameters": 52428800, "versions": [version] * 3},
        {"kind": "wire", "bytes": 1024 * MIB, "tcp_s": 0.4, "grpc_s": 1.0, "changes_s": {"1e-06": 0.01}},
        {"kind": "service", "pushes": pushes},
    ]
    packing, wire, (_, whole, changes) = tables(PUSH, {"push": cases})
    assert packing[1:] == [["1e-06", "4.0%", "2.0%", "200", "100"]]
    assert [row[2:] for row in wire[1:]] == [["2.50", "100%"], ["1.00", "40%"]]
    assert whole == ["every element", "100.0", "100.0%", "1.000", "1.500", "0.100", "3.000"]
    assert changes == ["changes at 1e-06", "2.0", "100.0%", "0.010", "0.600", "0.100", "1.200"]
    assert "52,428,800 parameters (100 MiB in bfloat16)" in PUSH.text({"push": cases})
    assert "runs at 1.95 GiB/s" in PUSH.text({"push": cases})


def test_long_answers_are_compared_with_the_ideal() -> None:
    case: dict[str, Any] = {
        "label": "max_lag 1",
        "alone": {"generation": 4000.0, "training": 5000.0},
        "ideal_tokens_per_s": 4000.0,
        "tokens_per_s": 3000.0,
        "masked_share": 0.02,
        "age_mean": 0.75,
        "age_max": 4.0,
        "shares": {"train": 0.6, "wait": 0.35, "wait_old": 0.25, "log": 0.03, "publish": 0.02},
        "answer_tokens": {"median": 64, "mean": 105.0, "max": 1280},
        "versions_mean": 1.5,
    }
    ((_, simulated, real),) = tables(TAIL, {"tail": [case, {**case, "ideal_tokens_per_s": None}]})
    assert simulated[1:] == ["3,000", "75%", "60%", "35%", "25%", "5%", "2%", "0.8, 4", "105, 1,280", "1.5"]
    assert real[2] == "-"
    assert "makes 4,000 tokens/s and training takes 5,000" in TAIL.text({"tail": [case]})
    # 64 requests take 10 + 6.4 ms a step; training takes nine tenths of that for the same 64 tokens.
    assert rates_alone() == pytest.approx({"generation": 64 / 0.0164, "training": 64 / 0.01476})


def test_times_of_the_page_have_their_95th_percentile() -> None:
    seconds = {"a filtered page": [0.01] * 18 + [0.05, 0.1], "the first page": [2.0]}
    case = {
        "rollouts": 512, "files": 2, "bytes": 3 * MIB, "tokens": 100.0, "characters": 640.0, "seconds": seconds,
        "processor_s": {"a filtered page": 0.015, "a search": 0.15}, "memory_bytes": 200 * MIB, "load": 1.25,
        "cores": 2,
    }  # fmt: skip
    ((_, filtered, first),) = tables(VIEW, {"view": [case]})
    # Of 20 values in order, the one at place 19.95: 95 % of the way from the 19th to the 20th.
    assert filtered == ["a filtered page", "20", "10", "98", "100"]
    assert first == ["the first page", "1", "2,000", "-", "2,000"]
    assert "15 ms a filtered page and 150 ms a search" in VIEW.text({"view": [case]})


def test_figures_between_two_looks() -> None:
    doing = ("busy", "training"), ("waiting", "rollouts")
    before = CounterSnapshot(100.0, {"learner": {doing[0]: 5.0}}, {"learner": 8.0}, 20.0, 1000.0, ())
    after = CounterSnapshot(110.0, {"learner": {doing[0]: 11.0, doing[1]: 2.0}}, {"learner": 23.0}, 25.0, 1600.0, ())
    figures = between(before, after)
    assert figures["idle_share"] == {"learner": pytest.approx(2.0 / 8.0)}
    assert figures["processor_share"] == {"learner": pytest.approx(1.5)}
    assert (figures["machine_idle_cores"], figures["tokens_generated"]) == (pytest.approx(0.5), 600.0)
    assert idle_share({}) == 0.0


def test_the_published_results_make_the_page(tmp_path: Path) -> None:
    """Every section that docs/benchmarks.json has is on the page as it is published, plots beside it."""
    (tmp_path / "benchmarks.md").write_text(f"# By hand\n\n{GENERATED}\nold\n")
    measured = json.loads((DOCS / "benchmarks.json").read_text())
    page = write_page(SECTIONS, measured, tmp_path).read_text()
    assert page.startswith(f"# By hand\n\n{GENERATED}\n\nMeasured on 2026-11-21 and 2026-11-22, in 59 minutes.")
    titles = [section.title for section in SECTIONS if section.name in measured]
    assert [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")] == titles
    published = (DOCS / "benchmarks.md").read_text().partition(GENERATED)[2].splitlines()
    # The table of the sandbox is newer than its results, as a sentence of the page says.
    assert [line for line in page.partition(GENERATED)[2].splitlines() if line not in published] == [
        line for line in REWARD.text({"reward": measured["reward"]["cases"]}).splitlines() if line not in published
    ]
    for name in ("steps", "waits", "memory", "learning"):
        assert (tmp_path / f"benchmarks-{name}.png").stat().st_size > 0
    assert json.loads((tmp_path / "benchmarks.json").read_text()) == measured


def test_an_unknown_section_is_an_error_that_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(["engin", "--page"])
    assert end.value.code == 2
    assert "engin is no section" in capsys.readouterr().err
