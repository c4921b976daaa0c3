"""The page of `gspo status`: generators with failed pushes, answers without a score, a new configuration."""

from __future__ import annotations

import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gspo.cli.monitor.drawing import instance_parts
from gspo.cli.monitor.process_usage import ProcessUsage
from gspo.cli.monitor.status import StatusPage, curriculum_lines
from gspo.cli.monitor.watcher import GeneratorAlerts, generator_problems
from gspo.common.config.loading import write_config
from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance
from gspo.learner.storage.run_directory import RunDir
from tests.support.monitoring.recorded_shortage import SENTENCE, record_shortage
from tests.unit.cli.step_logs import WHY, write_log


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def learner(**generator: object) -> Instance:
    current = {"name": "generation-0 (a:1)", "state": "current", "version": 7, "num_failures": 0, "problem": ""}
    current |= {"since_unix_s": None, "waiting": False}
    activity = {"kind": "busy", "what": "training", "detail": "step 8", "since_unix_s": time.time()}
    facts = {"generators": [current, current | generator]}
    return Instance("learner", "learner-0", beat_unix_s=time.time(), activity=activity, facts=facts)


def out() -> dict[str, object]:
    return {
        "name": "generation-0 (b:1)",
        "state": "out",
        "version": 4,
        "num_failures": 5,
        "problem": "DATA_LOSS: version 7 has digest aa and bb came",
        "since_unix_s": time.time() - 90,
    }


def test_a_generator_that_is_out_is_named_with_reason_and_time() -> None:
    expected = (
        "generation-0 (b:1) is out for 1 min 30 s, serving version 4: 5 pushes failed, the last: "
        "DATA_LOSS: version 7 has digest aa and bb came"
    )
    assert generator_problems([Instance("reward", "reward-0"), learner(**out())]) == [expected]
    console = Console(file=io.StringIO(), width=400)
    console.print(*instance_parts([learner(**out())], None))
    assert expected in printed(console)


@pytest.mark.parametrize(
    ("side", "purpose", "expected"),
    [
        ("learning", "step 5", r"the learner has the GPUs \(step 5\), for \d+ s"),
        ("generation", "", r"the generators have the GPUs, for \d+ s"),
    ],
)
def test_the_page_says_who_has_shared_gpus(
    config: Config, tmp_path: Path, side: str, purpose: str, expected: str
) -> None:
    shift = {"epoch": 1, "side": side, "purpose": purpose, "since_unix_s": time.time() - 90}
    write_log(tmp_path, {1: [None]})
    running = config.with_keys(services={"redis_url": "redis://127.0.0.1/0"})
    write_config(running, tmp_path / "config.yaml")
    console = Console(file=io.StringIO(), width=200)
    for present in (shift, {}):
        console.print(StatusPage(tmp_path, running).draw([replace(learner(), facts={"shift": present})]))
    (line,) = [line for line in printed(console).splitlines() if "the GPUs" in line]
    assert re.fullmatch(expected, line)


def test_the_page_says_how_many_drafts_were_accepted(config: Config, tmp_path: Path) -> None:
    write_log(tmp_path, {1: [None]})
    running = config.with_keys(services={"redis_url": "redis://127.0.0.1/0"})
    write_config(running, tmp_path / "config.yaml")
    console = Console(file=io.StringIO(), width=200)
    counts = {"generation-0": (4000, 1000), "generation-1": (0, 0)}
    generators = [
        replace(learner(), service="generation", name=name, facts={"drafts": {"proposed": proposed, "accepted": taken}})
        for name, (proposed, taken) in counts.items()
    ]
    console.print(StatusPage(tmp_path, running).draw([learner(), *generators]))
    lines = [line for line in printed(console).splitlines() if "draft" in line]
    assert lines == ["generation-0: 25% of 4,000 draft tokens were accepted"]


def test_the_page_says_how_many_prompts_of_a_curriculum_had_equal_rewards() -> None:
    rows = [
        {"source": "sum", "prompts": 40, "equal": 9, "passes": 3},
        {"source": "", "prompts": 7, "equal": 0, "passes": 0},
    ]
    coordinator = replace(learner(), service="coordinator", facts={"curriculum": rows})
    assert curriculum_lines([learner(), coordinator]) == [
        "curriculum of sum: 9 of 40 prompts had equal rewards at their last visit; 3 passes are done",
        "curriculum: 0 of 7 prompts had equal rewards at their last visit; 0 passes are done",
    ]


@pytest.mark.parametrize("width", [80, 100, 130, 10_000])
@pytest.mark.parametrize("used", [None, {}])
def test_names_and_addresses_are_whole_in_every_terminal(width: int, used: dict[str, ProcessUsage] | None) -> None:
    activity = {"kind": "waiting", "what": "slots", "detail": "all 32 taken: 0 open, 32 trained and not live yet"}
    instance = replace(learner(), http="127.0.0.1:34567", grpc="127.0.0.1:45678", pid=1234567, activity=activity)
    console = Console(file=io.StringIO(), width=width)
    console.print(*instance_parts([instance], used))
    shown = printed(console)
    assert all(word in shown for word in ("learner-0", "127.0.0.1:34567", "127.0.0.1:45678", "1234567"))
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


def test_answers_without_a_score_are_said_with_their_reasons(config: Config, tmp_path: Path) -> None:
    write_log(tmp_path, {1: [None, None], 2: [None, WHY.format(27)], 3: [WHY.format(8), "r: timed out after 10 s"]})
    write_config(config, tmp_path / "config.yaml")
    console = Console(file=io.StringIO(), width=10_000)
    console.print(StatusPage(tmp_path, config).draw([]))
    assert (
        "3 answers without a score, left out of training, in 2 of 3 steps, the last of them step 3. "
        f"2 times: {WHY.format(27)}; r: timed out after 10 s" in printed(console)
    )


def test_the_page_says_which_step_ran_out_of_memory(config: Config, tmp_path: Path) -> None:
    write_log(tmp_path, {1: [None]})
    write_config(config, tmp_path / "config.yaml")
    record_shortage(tmp_path)
    console = Console(file=io.StringIO(), width=10_000)
    console.print(StatusPage(tmp_path, config).draw([]))
    assert SENTENCE in printed(console).splitlines()


def test_the_page_says_that_rewards_teach_nothing(config: Config, tmp_path: Path) -> None:
    write_config(config, tmp_path / "config.yaml")
    with RunDir(tmp_path) as run_dir:
        for step in range(1, 4):
            run_dir.append_metrics(step, {"zero_spread_groups": 1.0, "reward_min": 0.0, "reward_max": 0.0})
    console = Console(file=io.StringIO(), width=10_000)
    console.print(StatusPage(tmp_path, config).draw([]))
    assert "no_signal, since step 3: the answers to each prompt have equal rewards" in printed(console)


def test_a_page_that_is_watched_takes_a_new_configuration(config: Config, tmp_path: Path) -> None:
    """A resume may raise run.total_steps while the page is shown."""
    write_log(tmp_path, {11: [None]})
    write_config(config, tmp_path / "config.yaml")
    look = StatusPage(tmp_path, config)
    console = Console(file=io.StringIO(), width=200)
    console.print(look.draw([]))
    longer = config.model_copy(update={"run": config.run.model_copy(update={"total_steps": 84})})
    write_config(longer, tmp_path / "config.yaml")
    os.utime(tmp_path / "config.yaml", (1, 1))
    console.print(look.draw([]))
    assert re.findall(r"step 11/\d+", printed(console)) == ["step 11/10", "step 11/84"]


def test_one_that_is_only_being_pushed_to_is_not_worth_a_line() -> None:
    behind = {"name": "generation-0 (b:1)", "state": "behind", "problem": "", "since_unix_s": time.time()}
    assert generator_problems([learner(**behind)]) == []


def test_a_push_that_takes_long_is_worth_one() -> None:
    behind = {"name": "generation-0 (b:1)", "state": "behind", "problem": "", "since_unix_s": time.time() - 7}
    expected = "generation-0 (b:1) is behind for 7 s, serving version 7: the push to it "
    assert generator_problems([learner(**behind)]) == [expected + "is in flight"]
    assert generator_problems([learner(**behind, waiting=True)]) == [expected + "waits for another push"]


def test_departure_and_return_are_reported_once_each_while_a_run_is_watched() -> None:
    news = GeneratorAlerts()
    back = {"name": "generation-0 (b:1)"}
    reports = [news.lines([learner(**generator)]) for generator in (back, out(), out(), back, back)]
    assert [[line.kind for line in lines] for lines in reports] == [[], ["warning"], [], ["note"], []]
    assert reports[1][0].text.startswith("generation-0 (b:1) is out for 1 min 30 s")
    assert reports[3][0].text == "generation-0 (b:1) has caught up"
    # A notice of the learner is a line once in the terminal, and in every page of `gspo status`.
    damaged = replace(learner(), facts={"notices": ["The checkpoint of step 4 is damaged (model.pt)."]})
    assert [line.text for line in news.lines([damaged])] == generator_problems([damaged]) == damaged.facts["notices"]
    assert news.lines([damaged]) == []
    # One that has left the run is not back.
    news.lines([learner(**out())])
    assert news.lines([]) == []
