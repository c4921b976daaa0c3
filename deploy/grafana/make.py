"""Writes the dashboards: `python deploy/grafana/make.py`. Their panels are below.

Every panel asks a question; its queries are tested against a real Prometheus that scrapes a real run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef

FOLDER = Path(__file__).parent / "dashboards"
# As in provisioning/datasources.
SOURCE = DataSourceRef("prometheus", "prometheus")
_HEIGHT, _STAT_HEIGHT, _COLUMNS = 7, 4, 24
RATE = "[$__rate_interval]"
ONE, SECONDS, BYTES, BYTES_PER_S, SHARE, PER_S = "short", "s", "bytes", "Bps", "percentunit", "cps"


@dataclass(frozen=True)
class Ask:
    """One question.

    Attributes:
        queries: (PromQL, legend of its series).
        help: What a reader may not know.
        is_number: Shown as a number, not over time.
    """

    question: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    is_number: bool = False


def ask(question: str, unit: str, *queries: tuple[str, str], help: str = "") -> Ask:  # noqa: A002 - the tooltip's name
    """A panel over time."""
    return Ask(question, unit, queries, help)


def number(question: str, unit: str, query: str, legend: str, help: str = "") -> Ask:  # noqa: A002 - as above
    """A panel with the value now."""
    return Ask(question, unit, ((query, legend),), help, is_number=True)


def quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """Median and 95th percentile of a histogram, with `by` for each value of a label."""
    name = f"{{{{{by}}}}} " if by else ""
    labels = f"le, {by}" if by else "le"
    return tuple(
        (f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{RATE})))", f"{name}{word}")
        for q, word in ((0.5, "median"), (0.95, "95 %"))
    )


def figure(*names: str) -> tuple[tuple[str, str], ...]:
    """Figures of the last step."""
    return tuple((f'gspo_step_figure{{figure="{name}"}}', name.replace("_", " ")) for name in names)


def per_second(metric: str, by: str = "") -> tuple[str, str]:
    """The rate of a counter, apart by the values of a label where one is given."""
    return (f"sum by ({by}) (rate({metric}{RATE}))", f"{{{{{by}}}}}") if by else (f"sum(rate({metric}{RATE}))", "all")


_STEP_TIME, _SCORED = f"rate(gspo_step_time_seconds_total{RATE})", "gspo_rollouts_scored_total"
_TIME_SHARES = f"sum by (cause) ({_STEP_TIME}) / on () group_left sum({_STEP_TIME})"
_FAILED = f'(sum(rate({_SCORED}{{result="failed"}}{RATE})) or vector(0)) / sum(rate({_SCORED}{RATE}))'
# The gauge is 0 until the learner is ready for its first step.
_STEP_TIMESTAMP = "gspo_step_timestamp_seconds"
_LAST_STEP = f"{_STEP_TIMESTAMP} > 0 or process_start_time_seconds and on (instance) {_STEP_TIMESTAMP} == 0"

OVERVIEW = {
    "Is it going?": [
        number("How many steps are trained?", ONE, "max(gspo_step)", "steps"),
        number(
            "How long ago did the last step end?",
            SECONDS,
            f"time() - max({_LAST_STEP})",
            "ago",
            help="Before the first: how long ago the learner was ready for it, and before that, since when it runs",
        ),
        number("What is the mean reward?", ONE, 'gspo_step_figure{figure="reward_mean"}', "reward"),
        number("How many alerts fire?", ONE, 'count(ALERTS{alertstate="firing"}) or vector(0)', "firing"),
        ask(
            "Where does the time of a step go?",
            SHARE,
            (_TIME_SHARES, "{{cause}}"),
            help="queue and generation: waiting for rollouts. The largest share but training is what bounds the run",
        ),
        ask("How long does a step take?", SECONDS, *figure("step_s", "wait_s", "train_s")),
    ],
    "1. Prompts are issued": [
        ask("Are all slots in use?", ONE, ("gspo_slots", "slots"), ("gspo_groups_open", "open groups")),
        ask("How many groups are issued?", PER_S, (f"rate(gspo_groups_issued_total{RATE})", "issued")),
        ask(
            "How do groups end?",
            PER_S,
            per_second("gspo_groups_settled_total", "settlement"),
        ),
    ],
    "2. Generators answer": [
        ask("How long does a group wait for a generator?", SECONDS, *quantiles("gspo_rollout_queue_seconds")),
        ask("How many rollouts are in flight?", ONE, ("gspo_rollouts_running", "{{instance}}")),
        ask(
            "How many tokens are generated?",
            PER_S,
            per_second("gspo_tokens_generated_total", "instance"),
        ),
        ask("How long does a rollout take?", SECONDS, *quantiles("gspo_rollout_seconds")),
    ],
    "3. Rewards score": [
        ask("How long does a rollout wait for a scorer?", SECONDS, *quantiles("gspo_score_queue_seconds")),
        ask("How long does a call of a function take?", SECONDS, *quantiles("gspo_reward_seconds", "function")),
        ask(
            "How many rollouts are scored?",
            PER_S,
            per_second(_SCORED, "result"),
        ),
    ],
    "4. The learner waits and trains": [
        ask("How long does a scored rollout wait for its step?", SECONDS, *quantiles("gspo_rollout_wait_seconds")),
        ask("How many tokens are trained?", PER_S, (f"rate(gspo_tokens_trained_total{RATE})", "trained")),
        ask("How old is what is trained, in versions?", ONE, *figure("age_mean", "age_max")),
    ],
    "5. Weights go back": [
        ask("How long does a push take?", SECONDS, *quantiles("gspo_push_seconds", "kind")),
        ask("How long does generation stand still for a push?", SECONDS, *quantiles("gspo_push_pause_seconds")),
        ask(
            "Do all generators serve the newest version?",
            ONE,
            ("gspo_policy_version", "learner"),
            ("gspo_generator_version", "{{instance}}"),
        ),
    ],
}

LEARNING = {
    "Does it learn?": [
        ask("Does the reward rise?", ONE, *figure("reward_mean", "reward_min", "reward_max")),
        ask("Do the answers to one prompt differ in reward?", ONE, *figure("reward_std", "zero_spread_groups"),
            help="Groups whose rewards are all equal teach nothing"),
        ask("How good is it on held-out prompts?", ONE,
            ('gspo_evaluation_figure{figure=~"sampled_mean|greedy_mean"}', "{{file}} {{figure}}")),
        ask("How many groups are of no use?", ONE, *figure("groups_filtered", "groups_stale", "groups_failed")),
    ],
    "Is the clip a bound, or noise?": [
        ask("What share is clipped?", SHARE,
            *figure("clipped_sequences", "clipped_sequences_low", "clipped_sequences_high", "clipped_tokens")),
        ask("What share would noise alone put outside the clip?", SHARE,
            *figure("noise_share", "noise_share_independent"), help="Above a third, clipping is chance"),
        ask("Why are sequences outside?", SHARE,
            *figure("outside_clip_noise", "outside_clip_lag", "outside_clip_movement"),
            help="Noise and lag at a step's first weights, and what its updates add. Unknown parts are missing"),
        ask("How far has the policy moved within a step?", ONE,
            *figure("log_ratio_mean", "log_ratio_std", "log_ratio_max")),
        ask("How far apart are the engines at equal weights?", ONE, *figure("sigma_token", "sigma_sequence")),
        ask("How much do answers weigh after the behavior correction?", ONE,
            *figure("behavior_weight_mean", "behavior_weight_geomean", "behavior_weight_std"),
            help="Weights before their bounds: 1 at the policy that sampled. Only under behavior_correction"),
        ask("What share of the tokens is outside the correction's bounds?", SHARE, *figure("behavior_outside")),
    ],
    "Is the policy healthy?": [
        ask("Does it still try different answers?", ONE, *figure("entropy")),
        ask("How far is it from the policy that sampled?", ONE,
            ('gspo_step_figure{figure=~"k1|k3|reference_kl|teacher_kl"}', "{{figure}}"),
            help="k1 and k3 estimate the KL divergence; reference_kl is to the reference policy, teacher_kl to the "
            "teacher, where one is used"),
        ask("How long are the answers, in tokens?", ONE, *figure("response_tokens_mean")),
        ask("What share is cut off?", SHARE, *figure("truncated_share")),
        ask("How large is the gradient?", ONE, *figure("grad_norm")),
        ask("What does the loss do?", ONE, *figure("loss")),
    ],
    "How do conversations go?": [
        ask("How long is a turn, in tokens?", ONE, *figure("turn_tokens_mean"),
            help="Of the policy. Turns that get shorter while they get more: the objective may pay for short turns"),
        ask("How many turns has a rollout?", ONE, *figure("turns_mean", "turns_done_mean"),
            help="turns done mean: of the conversations that the environment ended"),
    ],
    "Is it fresh?": [
        ask("How old are the tokens, in versions?", ONE, *figure("age_mean", "age_max")),
        ask("Which rollouts are left out, and why?", ONE,
            *figure("skipped_failed", "skipped_truncated", "skipped_stale")),
    ],
}  # fmt: skip

OPERATIONS = {
    "Is everybody there?": [
        ask("Does every process answer?", ONE, ("min by (job, instance) (up)", "{{job}} {{instance}}")),
        ask("How many processes are registered?", ONE, ("sum by (service) (gspo_instances)", "{{service}}")),
        ask("Who is busy, and who waits?", SHARE,
            (f'sum by (service, kind) (rate(gspo_activity_seconds_total{RATE}))', "{{service}} {{kind}}"),
            help="Of the time of all processes of a service"),
        ask("How many generators have the newest weights?", ONE, ("gspo_generators", "{{state}}")),
    ],
    "Is there room?": [
        ask("How much memory does each process use?", BYTES, ("process_resident_memory_bytes", "{{job}} {{instance}}"),
            help="Without the processes that it started: an engine's workers, sandboxes"),
        ask("How many cores does each process use?", ONE,
            (f"rate(process_cpu_seconds_total{RATE})", "{{job}} {{instance}}")),
        ask("How much memory does Redis use?", BYTES,
            ("gspo_redis_memory_bytes", "used"), ("gspo_redis_memory_limit_bytes", "limit")),
        ask("How much space has the run directory left?", BYTES, ("gspo_disk_free_bytes", "free")),
    ],
    "Does anything pile up?": [
        ask("How long are the streams?", ONE, ("gspo_stream_entries", "{{stream}}"), help="With leased entries"),
        ask("How many entries are untaken?", ONE, ("gspo_stream_untaken", "{{stream}}")),
        ask("How many groups are issued again?", PER_S,
            (f"sum(rate(gspo_groups_reissued_total{RATE})) or vector(0)", "issued again")),
        ask("Is the run paused?", ONE, ("gspo_paused", "paused")),
    ],
    "Does anything fail?": [
        ask("What share of the scores fails?", SHARE,
            (_FAILED, "failed")),
        ask("How do scores fail?", PER_S,
            (f"sum by (kind) (rate(gspo_score_failures_total{RATE})) or vector(0)", "{{kind}}")),
        ask("How do calls of functions end?", PER_S,
            (f"sum by (function, result) (rate(gspo_reward_calls_total{RATE}))", "{{function}} {{result}}")),
        ask("How do pushes fail?", PER_S,
            (f"sum by (status) (rate(gspo_push_failures_total{RATE})) or vector(0)", "{{status}}")),
        ask("What contains user code?", ONE, ("gspo_sandbox_level", "{{instance}}"),
            help="2 is bubblewrap, 1 Landlock, 0 limits alone"),
    ],
    "Are the GPUs used well?": [
        ask("What share of their peak do they reach?", SHARE, *figure("learner_mfu", "mfu"),
            help="Model flops (MFU): learner_mfu of the learner while it trains, mfu of the whole loop on all GPUs"),
        ask("How many tokens does each card train in a second?", PER_S,
            *figure("tokens_per_s_per_gpu", "learner_tokens_per_s_per_gpu")),
    ],
    "What does it cost?": [
        ask("How many bytes of weights are sent?", BYTES_PER_S,
            (f"sum by (kind) (rate(gspo_push_bytes_total{RATE}))", "{{kind}}")),
        ask("How long do checkpoints and the record hold up a step?", SECONDS, *figure("checkpoint_s", "record_s")),
    ],
}  # fmt: skip

DASHBOARDS = {
    "overview": ("gspo: rollout pipeline", OVERVIEW),
    "learning": ("gspo: learning", LEARNING),
    "operations": ("gspo: operations", OPERATIONS),
}


def build(name: str) -> str:
    """The JSON of a dashboard."""
    title, rows = DASHBOARDS[name]
    made = (
        dashboard.Dashboard(title)
        .uid(f"gspo-{name}")
        .tags(["gspo"])
        .readonly()
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    for row, asked in rows.items():
        made.with_row(dashboard.Row(row))
        for one, width in zip(asked, widths(asked), strict=True):
            made.with_panel((_number_panel if one.is_number else _time_panel)(one).span(width))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def widths(asked: Iterable[Ask]) -> list[int]:
    """The columns of each panel: numbers share a line, the others stand two or three in one."""
    asked = list(asked)
    numbers = sum(one.is_number for one in asked)
    others = len(asked) - numbers
    in_a_line = 3 if others % 3 == 0 else 2
    return [_COLUMNS // numbers if one.is_number else _COLUMNS // in_a_line for one in asked]


def _queries(one: Ask) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .expr(query)
        .legend_format(legend)
        .ref_id(chr(ord("A") + place))
        .datasource(SOURCE)
        .range()
        for place, (query, legend) in enumerate(one.queries)
    ]


def _number_panel(one: Ask) -> stat.Panel:
    panel = stat.Panel().title(one.question).description(one.help).datasource(SOURCE).unit(one.unit)
    return panel.height(_STAT_HEIGHT).targets(_queries(one))


def _time_panel(one: Ask) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    panel = timeseries.Panel().title(one.question).description(one.help).datasource(SOURCE).unit(one.unit)
    panel = panel.height(_HEIGHT).targets(_queries(one)).legend(legend.show_legend(True)).tooltip(tooltip)
    panel = panel.line_width(1).fill_opacity(8).gradient_mode(GraphGradientMode.OPACITY)
    return (
        panel.show_points(VisibilityMode.NEVER)
        if one.unit != SHARE
        else panel.show_points(VisibilityMode.NEVER).min(0).max(1)
    )


def main() -> None:
    """Write every dashboard."""
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(build(name))


if __name__ == "__main__":
    main()
