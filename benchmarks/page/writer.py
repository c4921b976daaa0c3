"""docs/benchmarks.md from the results of the parts: machine, method, tables, plots.

The text above the line GENERATED is written by hand and stays.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.harness.sizes import GROUP_SIZE, GROUPS, MAX_TOKENS, NUM_MINI_BATCHES, NUM_ROLLOUTS
from benchmarks.harness.tables import number
from benchmarks.harness.workload import HIDDEN_SIZE, LAYERS, model_folder, num_parameters
from benchmarks.page import sections
from benchmarks.page.plots import draw_learning, draw_memory, draw_steps, draw_waits
from benchmarks.page.sections import Results
from benchmarks.pipeline import rollout_rate_tables
from benchmarks.push import weight_update_tables
from benchmarks.system import startup_table
from benchmarks.tails import long_answers_table

NAME = "benchmarks"
GENERATED = "<!-- Below this line: written by make bench -->"
_BY_HAND = """# Benchmarks

`make bench` measures one machine in one run. The numbers belong to that machine and day.
"""


def write_page(results: Results, folder: Path) -> Path:
    """Write the page, its plots, and all results as JSON beside it; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{NAME}.md"
    by_hand = page.read_text().partition(GENERATED)[0] if page.exists() else _BY_HAND
    _draw(results, folder)
    page.write_text(f"{by_hand.rstrip()}\n\n{GENERATED}\n{_render(results)}")
    (folder / f"{NAME}.json").write_text(json.dumps(results, indent=1) + "\n")
    return page


def _render(results: Results) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        autoescape=False,  # noqa: S701 - the page is Markdown
    )
    newest = max(results.values(), key=lambda part: part["measured_unix_s"])
    dates = {time.strftime("%Y-%m-%d", time.gmtime(part["measured_unix_s"])) for part in results.values()}
    seconds = sum(case["took_s"] for part in results.values() for case in part["cases"])
    return environment.get_template("benchmarks.md.j2").render(
        dates=" and ".join(sorted(dates)),
        minutes=number(seconds / 60, 0),
        machine=newest["machine"],
        shape=_shape(),
        engine=sections.engine(results) if "engine" in results else "",
        learner=sections.learner(results) if "learner" in results else "",
        system=_system(results) if "system" in results else None,
        learning=sections.learning(results) if "learning" in results else "",
        pipeline=_pipeline(results) if "pipeline" in results else None,
        reward=sections.reward(results) if "reward" in results else "",
        logprobs=sections.logprobs(results) if "logprobs" in results else "",
        start=startup_table.start(sections.cases(results, "start")) if "start" in results else "",
        push=_push(results) if "push" in results else None,
        tail=_tail(results) if "tail" in results else None,
    )


def _system(results: Results) -> dict[str, str]:
    return {
        "times": sections.times(results),
        "shares": sections.shares(results),
        "pushes": sections.pushes(results),
    }


def _pipeline(results: Results) -> dict[str, str]:
    found = sections.cases(results, "pipeline")
    return {"rates": rollout_rate_tables.rates(found), "memory": rollout_rate_tables.memory(found)}


def _push(results: Results) -> dict[str, str]:
    found = sections.cases(results, "push")
    return weight_update_tables.facts(found) | {
        "packing": weight_update_tables.packing(found),
        "wire": weight_update_tables.wire(found),
        "pushes": weight_update_tables.pushes(found),
    }


def _tail(results: Results) -> dict[str, str]:
    found = sections.cases(results, "tail")
    return long_answers_table.facts(found) | {"table": long_answers_table.tail(found)}


def _shape() -> dict[str, Any]:
    return {
        "rollouts": NUM_ROLLOUTS,
        "groups": GROUPS,
        "size": GROUP_SIZE,
        "mini_batches": NUM_MINI_BATCHES,
        "parameters": number(num_parameters(model_folder("fixed")), 0),
        "layers": LAYERS,
        "width": HIDDEN_SIZE,
        "fixed": MAX_TOKENS["fixed"],
        "longest": MAX_TOKENS["long-tailed"],
    }


def _draw(results: Results, folder: Path) -> None:
    if system := sections.cases(results, "system"):
        draw_steps(system, sections.alone(results), folder / f"{NAME}-steps.png")
        draw_waits(system, folder / f"{NAME}-waits.png")
    if pipeline := sections.cases(results, "pipeline"):
        draw_memory(pipeline, folder / f"{NAME}-memory.png")
    if learning := sections.cases(results, "learning"):
        draw_learning(learning, folder / f"{NAME}-learning.png")
