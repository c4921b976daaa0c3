"""A plan advises no GPU that is not there, takes the context that models read, and writes the keys that users judge."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.plans.published_models import published_models
from gspo.cli.plan.plan_request import LONGEST_CONTEXT, Planned, PlanRequest, choice_of, planned_choice
from gspo.cli.plan.plan_tables import advices, print_plan
from gspo.cli.plan.planner import check_means, context_of, parse_tokens, plan_keys
from gspo.cli.plan.rates import find_kind, rates_of
from gspo.cli.plan.refusal import does_not_fit
from gspo.common.config.presets import fitting_clip
from gspo.common.errors import InputError

QWEN3_8B = published_models()["Qwen3-8B"]
REQUEST = PlanRequest("Qwen3-8B", 8, context=LONGEST_CONTEXT, host_gib=2048)


def plan_of(request: PlanRequest, bound: str) -> Planned:
    """A plan whose steps are bound by this part."""
    gpu = find_kind(None, 80)
    choice = choice_of(request, QWEN3_8B, gpu)
    assert choice is not None and not choice.shortages
    planned = planned_choice(request, QWEN3_8B, gpu, rates_of(gpu), choice)
    times = replace(
        planned.times, **{end: replace(getattr(planned.times, end), bound=bound) for end in ("fast", "slow")}
    )
    return replace(planned, times=times)


@pytest.mark.parametrize("bound", ["generation", "training"])
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_no_advice_needs_gpus_that_are_not_there(bound: str, num_gpus: int) -> None:
    first, second = advices(plan_of(replace(REQUEST, num_gpus=num_gpus), bound))
    assert "shorten" in first and "generation.replicas" not in first
    assert second == f"All GPUs ({num_gpus}) of this plan are in use: --gpus plans for more."


def test_idle_gpus_are_counted() -> None:
    """Seven GPUs: four train, and three generate; with two for each generator one is idle."""
    planned = plan_of(replace(REQUEST, num_gpus=7), "generation")
    assert advices(planned)[1].startswith("All GPUs (7)")
    config = planned.choice.config.with_keys(generation={"engine": {"tensor_parallel_size": 2}, "replicas": 1})
    idle = replace(planned, choice=replace(planned.choice, config=config))
    assert advices(idle)[1] == "1 GPU of this plan would be idle."


@pytest.mark.parametrize(("num_gpus", "words"), [(8, ""), (16, "It is for 2 machines of 8 GPUs")])
def test_a_plan_for_several_machines_names_the_command(num_gpus: int, words: str) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(plan_of(replace(REQUEST, num_gpus=num_gpus), "training"), console)
    printed = console.export_text()
    assert words in printed
    assert ("`gspo run CONFIG.yaml --cluster ray`" in printed) == bool(words)


def test_a_bound_that_gpus_do_not_move_has_no_word_on_gpus() -> None:
    (line,) = advices(plan_of(REQUEST, "longest answers"))
    assert "GPU" not in line


@pytest.mark.parametrize(
    ("positions", "teacher", "expected"),
    [(0, None, 8192), (40_960, None, 8192), (256, None, 256), (40_960, 512, 512), (256, 0, 256)],
)
def test_the_context_is_by_default_what_the_models_read(positions: int, teacher: int | None, expected: int) -> None:
    taught = None if teacher is None else replace(QWEN3_8B, max_positions=teacher)
    profile = replace(QWEN3_8B, max_positions=positions, teacher=taught)
    assert context_of(replace(REQUEST, context=0), profile) == expected


def test_a_context_beyond_a_teacher_is_refused_with_its_name() -> None:
    profile = replace(QWEN3_8B, teacher=replace(QWEN3_8B, max_positions=4096))
    with pytest.raises(InputError, match="8192 tokens, and the teacher reads at most 4096"):
        context_of(REQUEST, profile)


def test_the_keys_of_a_plan_name_updates_clip_and_learning_rate() -> None:
    request = replace(REQUEST, mean_answer=256)
    keys = plan_keys(plan_of(request, "generation").choice.config)
    low, high = fitting_clip(256)
    assert keys["algorithm"]["num_mini_batches"] == 4
    assert (keys["algorithm"]["pg_clip_low"], keys["algorithm"]["pg_clip_high"]) == (low, high)
    assert keys["learner"]["learning_rate"] == 1e-6
    assert low > 3e-4 and math.isclose(low, 3e-4 * math.sqrt(4096 / 256), rel_tol=0.05)


@pytest.mark.parametrize(
    ("changes", "argument", "most"),
    [
        ({"mean_answer": 6145}, "--answer-tokens", 6144),
        ({"mean_answer": math.inf}, "--answer-tokens", 6144),
        ({"mean_prompt": math.inf}, "--prompt-tokens", 2048),
    ],
)
def test_a_mean_is_no_more_than_the_longest(changes: dict[str, float], argument: str, most: int) -> None:
    with pytest.raises(InputError, match=rf"^{argument}: .* is more than the longest has in a context of 8192: {most}"):
        check_means(replace(REQUEST, **changes))  # type: ignore[arg-type]
    check_means(replace(REQUEST, mean_answer=6144, mean_prompt=2048))


@pytest.mark.parametrize("text", ["0", "1", "7", "-5k", "1.5k", "8 tokens", ""])
def test_a_context_has_a_prompt_and_an_answer(text: str) -> None:
    with pytest.raises(InputError, match=r"--context: .* does not count tokens of a prompt and its answer"):
        parse_tokens(text)
    assert (parse_tokens("8"), parse_tokens("32k")) == (8, 32768)


def test_work_divides_over_whole_hosts_as_the_refusal_says() -> None:
    request, gpu = replace(REQUEST, num_gpus=13, gpus_per_host=5), find_kind(None, 80)
    assert choice_of(request, QWEN3_8B, gpu) is None
    error = does_not_fit(request, QWEN3_8B, gpu, None)
    assert "512 rollouts in 4 mini-batches divide over no number of ranks on whole hosts of 5 GPUs" in error.rule
    assert error.fix == "Choose --groups times --group-size as a multiple of 20"
    assert choice_of(replace(request, groups=65), QWEN3_8B, gpu) is not None


def test_a_refusal_names_as_many_gpus_as_are_needed() -> None:
    gpu, request = find_kind(None, 80), replace(REQUEST, host_gib=1280)
    profile = published_models()["Qwen3-235B-A22B"]
    error = does_not_fit(request, profile, gpu, choice_of(request, profile, gpu))
    assert error.fix.startswith("These fit: --gpus 72")
    fitting = choice_of(replace(request, num_gpus=72), profile, gpu)
    assert fitting is not None and not fitting.shortages
