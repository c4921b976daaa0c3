"""docs/benchmarks.md from the results of its sections: machine, method, tables, plots.

The text above the line GENERATED is written by hand and stays.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.section import PageSection, Record
from benchmarks.harness.workload import (
    GROUP_SIZE,
    GROUPS,
    HIDDEN_SIZE,
    LAYERS,
    MAX_TOKENS,
    NUM_ROLLOUTS,
    model_folder,
    num_parameters,
)

NAME = "benchmarks"
GENERATED = "<!-- Below this line: written by make bench -->"
_BY_HAND = """# Benchmarks

`make bench` measures one machine in one run. The numbers belong to that machine and day.
"""
_HEAD = """
Measured on {dates}, in {minutes:.0f} minutes.

- Processor: {processor}, {cores} cores, {memory_gib} GiB of memory, {system}
- Python {python}; {packages}
- Every result: [benchmarks.json](benchmarks.json)

A step has {rollouts} rollouts ({groups} prompts, {size} answers to each) of a random Qwen3 with {parameters:,} \
parameters ({layers} layers, width {width}, one token a character). *Fixed*: without an end-of-sequence token, so \
every answer has {fixed} tokens. *Long-tailed*: the answer ends at a random token, at most the {longest}th.
"""


def write_page(sections: Sequence[PageSection], measured: Mapping[str, Record], folder: Path) -> Path:
    """Write the page, its plots, and all results as JSON beside it; the page's path."""
    cases = {name: record["cases"] for name, record in measured.items()}
    usual = _usual_processor(measured)
    texts = [_head(measured, usual)]
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        if section.name in cases:
            texts.append(f"## {section.title}\n\n{_where(measured[section.name], usual)}{section.text(cases).strip()}")
            for draw in section.plots:
                draw(cases, folder)
    (folder / f"{NAME}.json").write_text(json.dumps(measured, indent=1) + "\n")
    return write_below(folder / f"{NAME}.md", GENERATED, "\n\n".join(texts), _BY_HAND)


def write_below(page: Path, line: str, text: str, by_hand: str) -> Path:
    """Replace everything below a line of a page; without a page, `by_hand` comes above it. The page's path."""
    if page.exists():
        by_hand = page.read_text().partition(line)[0]
    page.write_text(f"{by_hand.rstrip()}\n\n{line}\n\n{text.strip()}\n")
    return page


def _usual_processor(measured: Mapping[str, Record]) -> str:
    """That of the most sections."""
    return Counter(str(record["machine"]["processor"]) for record in measured.values()).most_common(1)[0][0]


def _where(record: Record, usual: str) -> str:
    """A paragraph for a section that was measured with another processor than most."""
    machine = record["machine"]
    return "" if machine["processor"] == usual else f"Measured on {_day(record)} with {machine['processor']}.\n\n"


def _day(record: Record) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(record["measured_unix_s"]))


def _head(measured: Mapping[str, Record], usual: str) -> str:
    records = [record for record in measured.values() if record["machine"]["processor"] == usual]
    machine: Record = max(records, key=lambda record: float(record["measured_unix_s"]))["machine"]
    dates = {_day(record) for record in records}
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return _HEAD.format(
        **machine | {"packages": packages},
        dates=" and ".join(sorted(dates)),
        minutes=sum(case["took_s"] for record in records for case in record["cases"]) / 60,
        rollouts=NUM_ROLLOUTS,
        groups=GROUPS,
        size=GROUP_SIZE,
        parameters=num_parameters(model_folder("fixed")),
        layers=LAYERS,
        width=HIDDEN_SIZE,
        fixed=MAX_TOKENS["fixed"],
        longest=MAX_TOKENS["long-tailed"],
    ).strip()
