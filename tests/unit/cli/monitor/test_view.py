"""The view after events, and its drawing."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gspo.cli.monitor.drawing import process_cells
from gspo.cli.monitor.screens import PlainScreen, draw, sparkline
from gspo.cli.monitor.view import Phases, ScreenLine, ServiceProcess, View, load_history, step_line
from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance
from gspo.common.telemetry.clip_causes import mismatch_line
from gspo.common.telemetry.gpu_use import gpu_use_line
from gspo.common.telemetry.step_time import duration
from gspo_proto.rollout_pb2 import (
    RUN_END_FAILED,
    EvaluationDone,
    Event,
    Finished,
    FirstAnswers,
    GroupsSettled,
    ScoresDiffer,
    SettledGroup,
    Settlement,
    StepDone,
    TrainingDone,
    VersionLive,
)
from tests.unit.cli.step_logs import WHY, write_log


@pytest.fixture
def view(config: Config, tmp_path: Path) -> View:
    """A view of a run that has just begun."""
    evaluation = config.evaluation.model_copy(update={"prompts": tmp_path / "e.jsonl", "keep_best": "sampled_mean"})
    config = config.model_copy(update={"evaluation": evaluation})
    return View(
        config, tmp_path, {name: ServiceProcess(name, time.time()) for name in ("learner-0", "reward-0")}, Phases()
    )


def step(number: int, **figures: float) -> Event:
    """A step that ended ten seconds after the one before."""
    done = StepDone(step=number, version=number, groups=[2 * number, 2 * number + 1], figures=figures)
    return Event(unix_s=1000.0 + 10 * number, step_done=done)


def drawn(view: View, *, ended: bool = False) -> str:
    """The live panel as text."""
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    console.print(draw(view, ended=ended))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_answers_without_a_score_are_a_warning_with_their_reason(view: View) -> None:
    """A new reason is a line, and each tenfold number of answers."""
    few: list[str | None] = [WHY.format(number) for number in range(3)]
    write_log(view.run_dir, {1: [None, *few], 2: few, 3: few, 4: few, 5: [*few, "r: timed out after 10 s"]})
    warnings = [view.apply(step(number, skipped_failed=3))[1:] for number in range(1, 6)]
    assert [[line.kind for line in lines] for lines in warnings] == [["warning"], [], [], ["warning"], ["warning"]]
    assert warnings[0][0].text == f"step 1: 3 answers have no score, and are left out: 3 times: {WHY.format(0)}"
    assert warnings[3][0].text.startswith("step 4: 3 answers have no score, 12 so far, and are left out: 12 times: ")
    assert warnings[4][0].text.endswith("r: timed out after 10 s")
    assert view.apply(step(6, reward_mean=1.0))[1:] == []


def test_the_last_drawing_says_nothing_of_what_has_ended(view: View) -> None:
    assert "reward-0" in drawn(view) and "Ctrl-C stops" in drawn(view)
    ended = drawn(view, ended=True)
    assert "step" in ended and "reward-0" not in ended and "Ctrl-C" not in ended


def test_steps_give_figures_counts_and_the_time_to_go(view: View) -> None:
    view.apply(step(1, reward_mean=0.25))
    lines = view.apply(step(2, reward_mean=0.5, clipped_sequences=0.125, age_mean=0.5, age_max=1, tokens_per_s=2000))
    assert (view.step, view.version, view.rewards) == (2, 2, [0.25, 0.5])
    assert view.eta_s == 80.0  # 8 steps of 10 s
    assert lines == [ScreenLine(step_line(view), "step")]
    assert step_line(view) == (
        "step 2/10  reward 0.500  clipped 12%  age 0.50  max 1  tokens/s 2,000  version 2  1 min 20 s to go"
    )


def test_groups_that_fail_are_said(view: View) -> None:
    groups = [
        SettledGroup(group=4, settlement=Settlement.SETTLEMENT_FAILED, reason="reward raised KeyError"),
        SettledGroup(group=5, settlement=Settlement.SETTLEMENT_STALE, reason="too old"),
    ]
    (line,) = view.apply(Event(groups_settled=GroupsSettled(groups=groups)))
    assert line == ScreenLine("group 4 failed: reward raised KeyError", "warning")

    again = [
        SettledGroup(group=number, settlement=groups[0].settlement, reason=groups[0].reason) for number in range(30)
    ]
    (line,) = view.apply(Event(groups_settled=GroupsSettled(groups=again)))
    assert line.text == "10 groups have failed, the last 8: reward raised KeyError"


def test_a_warning_is_said_once_until_it_has_gone(view: View) -> None:
    def warnings(number: int, clipped: float) -> int:
        return sum(line.kind == "warning" for line in view.apply(step(number, clipped_sequences=clipped)))

    assert [warnings(number, 0.5) for number in range(1, 13)] == [0] * 9 + [1] + [0] * 2
    assert warnings(13, 0.1) == 0
    assert [warnings(number, 0.5) for number in range(14, 24)] == [0] * 9 + [1]


def test_phases_follow_the_events(view: View) -> None:
    view.phases.enter("start")
    view.phases.enter("evaluation_before")
    view.apply(Event(evaluation_done=EvaluationDone(version=0, figures={"sampled_mean": 0.25, "greedy_mean": 0.5})))
    assert view.phases.current == "training"
    view.apply(Event(training_done=TrainingDone(step=3, reason="run.total_steps reached")))
    assert (view.phases.current, view.step) == ("evaluation_after", 3)
    (line,) = view.apply(Event(finished=Finished(reason="all rewards failed", end=RUN_END_FAILED)))
    assert line == ScreenLine("failed: all rewards failed", "error")
    view.phases.enter("")
    assert set(view.phases.wall_s) == {"checks", "start", "evaluation_before", "training", "evaluation_after"}


def test_an_unknown_event_is_passed_over(view: View) -> None:
    assert view.apply(Event()) == []


def test_history_of_a_resumed_run_is_read_and_a_half_line_left_out(view: View) -> None:
    log = view.run_dir / "log"
    log.mkdir()
    record: dict[str, Any] = {"step": 1, "version": 1, "unix_s": 1.0, "figures": {"reward_mean": 0.5}}
    (log / "metrics.jsonl").write_text(json.dumps(record) + '\n{"step": 2, "ver')
    evaluation = {"label": "v0", "version": 0, "step": 0, "unix_s": 1.0, "figures": {"sampled_mean": 0.25}}
    (log / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    load_history(view)
    assert (view.step, view.rewards, list(view.by_file)) == (1, [0.5], [""])
    assert [(record.version, record.figures) for record in view.evaluations] == [(0, {"sampled_mean": 0.25})]
    assert view.best is None


def test_the_panel_shows_what_matters(view: View) -> None:
    view.apply(step(1, reward_mean=0.25, clipped_sequences=0.125, age_mean=0.5, age_max=1, tokens_per_s=2000))
    view.apply(Event(evaluation_done=EvaluationDone(version=0, figures={"sampled_mean": 0.25}, score=0.25)))
    figures = {"sampled_mean": 0.75, "sampled_stderr": 0.05, "pass_at_1": 0.5, "pass_at_4": 0.875}
    (line,) = view.apply(Event(evaluation_done=EvaluationDone(version=1, figures=figures, score=0.75)))
    assert line.text == "held-out prompts at version 1: sampled 0.750 ± 0.050, pass@4 0.875; the best by sampled_mean"
    view.apply(Event(version_live=VersionLive(version=0)))
    activity = {"kind": "waiting", "what": "rewards", "detail": "of 3 groups", "since_unix_s": time.time() - 7}
    view.processes["learner-0"].instance = Instance("learner", "learner-0", activity=activity)
    text = drawn(view)
    for shown in (
        "step 1/10  reward 0.250  clipped 12%  age 0.50  max 1  tokens/s 2,000  version 1",
        "held-out prompts at version 1: sampled 0.750 ± 0.050, pass@4 0.875 (first at version 0)",
        "best version: 1 (sampled_mean 0.750 ± 0.050)",
        "generators have version 0",
        "waiting for rewards of 3 groups",
        "7 s",
        "reward-0",
        "importing its libraries",
    ):
        assert shown in text, shown


def test_a_long_wait_is_highlighted_and_a_short_one_is_not() -> None:
    def style(seconds: float, kind: str = "waiting") -> str:
        activity = {"kind": kind, "what": "rewards", "detail": "", "since_unix_s": time.time() - seconds}
        return str(
            process_cells(ServiceProcess("learner-0", 0.0, Instance("learner", "learner-0", activity=activity)))[
                1
            ].style
        )

    assert (style(1), style(8)) == ("dim", "bold yellow")
    assert "yellow" not in style(8, "busy")


def test_what_the_start_waits_for(view: View) -> None:
    view.processes["reward-0"].ready = True
    learner = view.processes["learner-0"]
    assert view.waited_for() == "learner-0: importing its libraries (for 0 s)"
    activity = {"kind": "busy", "what": "loading the model", "detail": "/m", "since_unix_s": time.time() - 12}
    learner.instance = Instance("learner", "learner-0", activity=activity)
    assert view.waited_for() == "learner-0: loading the model /m (for 12 s)"
    learner.instance.activity["kind"] = "waiting"
    assert view.waited_for() == "learner-0: waiting for loading the model /m (for 12 s)"
    learner.problem = "learner-0 refuses our token"
    assert view.waited_for().startswith("learner-0: learner-0 refuses our token (")


def test_plain_lines_carry_their_kind() -> None:
    file = io.StringIO()
    screen = PlainScreen(Console(file=file, width=200))
    screen.say(ScreenLine("step 1"))
    screen.say(ScreenLine("[1, 2] is odd", "warning"))
    assert [line[10:] for line in file.getvalue().splitlines()] == ["step 1", "warning: [1, 2] is odd"]


def test_sparkline_and_durations() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"
    assert [duration(s) for s in (4.4, 65, 7800)] == ["4 s", "1 min 5 s", "2 h 10 min"]


def test_the_use_of_the_gpus_is_one_line_also_where_their_peak_is_unknown() -> None:
    figures = {"step_s": 4.0, "train_s": 1.0, "gpus": 8.0}
    figures |= {"tokens_per_s_per_gpu": 1250.0, "learner_flops_per_s": 2e14}
    assert gpu_use_line([]) == ""
    assert gpu_use_line([figures, {"tokens": 100.0}]) == gpu_use_line([figures]), "the last one was trained on a resume"
    assert gpu_use_line([figures]) == "learner 200 Tflop/s; trained tokens/s a GPU: 1,250 (GPUs: 8)"
    known = figures | {"learner_mfu": 0.4, "mfu": 0.125}
    assert gpu_use_line([known]) == "MFU: learner 40.0%, whole loop 12.5%; trained tokens/s a GPU: 1,250 (GPUs: 8)"


def test_the_last_measurement_of_the_mismatch_has_its_age(config: Config) -> None:
    clip = mismatch_line([{"noise_share": 0.04, "noise_clip": 0.00123, "mismatch_age": 0.0}], config)
    assert clip.endswith(
        "puts 4% outside the clip, measured in this step; 1% would be outside a clip of 0.0012 on both sides"
    )
    measured = {"noise_share": 0.04, "mismatch_age": 0.0}
    assert mismatch_line([], config) == mismatch_line([{}], config) == ""
    assert mismatch_line([measured], config).endswith("puts 4% outside the clip, measured in this step")
    later = [measured, {"mismatch_age": 12.0}]
    assert mismatch_line(later, config).endswith("puts 4% outside the clip, measured 12 steps ago")
    assert mismatch_line(later[1:], config).endswith("was measured 12 steps ago")
    off = config.model_copy(update={"learner": config.learner.model_copy(update={"mismatch_every": 0})})
    assert "learner.mismatch_every: 0" in mismatch_line([{}], off)
    assert mismatch_line([], off) == ""


def test_the_verdict_on_the_first_answers_is_a_warning_before_any_step(view: View) -> None:
    figures = {"groups": 2.0, "zero_spread_groups": 1.0, "reward_mean": 0.0, "reward_min": 0.0, "reward_max": 0.0}
    event = FirstAnswers(figures={**figures, "response_tokens_mean": 2.0})
    (line,) = view.apply(Event(first_answers=event))
    assert line.kind == "warning" and line.text.startswith("first_answers: the 2 groups before the first update")
    assert "every answer gets 0" in line.text and view.step == 0
    assert view.apply(Event(first_answers=event)) == [], "a learner that was started again judges them again"


def test_each_function_whose_scores_differ_is_a_warning_once(view: View) -> None:
    event = Event(scores_differ=ScoresDiffer(function="guess", num_differing=2, num_answers=16, first=0.5, again=0.7))
    (line,) = view.apply(event)
    assert line.kind == "warning" and "2 of 16 answers got another value of guess" in line.text
    assert view.apply(event) == [], "each replica of the reward service tries it"
    event.scores_differ.function = "other"
    assert len(view.apply(event)) == 1
