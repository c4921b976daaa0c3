"""Makes pages of templates: for the server of a run's page, or as one file that needs nothing else.

Texts of a model are untrusted: everything is escaped, and a page may load and run nothing but its own files. In one
file, a policy in its head has their digests.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gspo.common.host.durable_write import replace_file
from gspo.common.telemetry.step_time import duration
from gspo.runlog.run_history import RunHistory
from gspo.runlog.run_log import PAGE_NAME, SUMMARY_NAME
from gspo.view.page_text import LEGENDS, MAX_CHARS, MAX_TOKENS, visible
from gspo.view.picture.curves import Curve
from gspo.view.picture.plots import curves_of
from gspo.view.picture.replay_results import ReplayResult
from gspo.view.picture.summary import summarise
from gspo.view.picture.tables import stale_by_length
from gspo.view.picture.viewed_run import run_facts

TEMPLATES = Path(__file__).parents[1] / "templates"
# Parts of a page of one file.
_STYLES, _SCRIPTS = ("style.css", "uplot/uPlot.min.css"), ("uplot/uPlot.iife.min.js", "curves.js")
# Files that the server of the page serves beside its pages, with the media types.
FILES = dict.fromkeys(_STYLES, "text/css") | dict.fromkeys((*_SCRIPTS, "follow.js", "trial.js"), "text/javascript")


def _columns(text: str) -> dict[str, str]:
    """The data's columns of a rollout by name, each as text: a right answer, and what else rewards may take."""
    values = json.loads(text or "{}").items()
    return {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in values}


class Templates:
    """The templates of a run's page.

    Args:
        run_name: In the head of each page.
        num_runs: Runs that the page compares.
        is_file: Whether a page is one file for itself, without a server.
    """

    def __init__(self, run_name: str, num_runs: int = 1, *, is_file: bool = False) -> None:
        self._is_file = is_file
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
        self._environment.filters.update(
            visible=visible,
            parts=lambda text: json.loads(text or "[]"),
            columns=_columns,
            cut=lambda text: visible(text[:MAX_CHARS]),
            figure=lambda value: "none" if value is None else f"{value:.4g}",
            number=lambda value: "none" if value is None else f"{value:.3f}",
            duration=lambda seconds: f"{seconds:.1f} s" if seconds < 10 else duration(seconds),
        )
        self._environment.globals.update(
            run_name=run_name, num_runs=num_runs, is_file=is_file, legends=LEGENDS, max_chars=MAX_CHARS,
            max_tokens=MAX_TOKENS, style=self._style, script=self._script, policy=_policy,
            license=_file("uplot/LICENSE"),
        )  # fmt: skip

    def text(self, template: str, **values: Any) -> str:
        return self._environment.get_template(template).render(**values)

    def _style(self, name: str) -> str:
        return f"<style>{_file(name)}</style>" if self._is_file else f'<link rel="stylesheet" href="/{name}">'

    def _script(self, name: str) -> str:
        return f"<script>{_file(name)}</script>" if self._is_file else f'<script src="/{name}" defer></script>'


def _file(name: str) -> str:
    return (TEMPLATES / name).read_text()


def _policy() -> str:
    """The content security policy of a page of one file: its own styles and scripts by their digests, and no more."""
    digests = {name: hashlib.sha256(_file(name).encode()).digest() for name in (*_STYLES, *_SCRIPTS)}
    sources = {name: f"'sha256-{base64.b64encode(digest).decode()}'" for name, digest in digests.items()}
    styles, scripts = (" ".join(sources[name] for name in names) for names in (_STYLES, _SCRIPTS))
    return f"default-src 'none'; style-src {styles}; script-src {scripts}; base-uri 'none'; form-action 'none'"


def page_file(template: str, run_name: str, curves: Sequence[Curve], **values: Any) -> bytes:
    templates = Templates(run_name, is_file=True)
    text = templates.text(template, curves=[curve.as_json() for curve in curves], **values)
    return text.encode(errors="replace")


def report_file(history: RunHistory, summary: dict[str, Any]) -> bytes:
    lost = stale_by_length(history)
    return page_file("run.html", summary["run"], curves_of(history), lost=lost, **run_facts(history, summary))


def replay_file(name: str, run_name: str, result: dict[str, Any]) -> bytes:
    shown = ReplayResult.model_validate(result)
    return page_file("replay.html", run_name, shown.curves(), name=name, result=shown)


def write_report(
    run_dir: Path, *, wall_s: dict[str, float] | None = None, finished: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write summary.json and report.html from the run directory alone, for a run in any state; return the summary.

    Args:
        wall_s, finished: As in `summarise`.
    """
    history = RunHistory(run_dir)
    summary = summarise(history, wall_s, finished)
    replace_file(run_dir / SUMMARY_NAME, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    replace_file(run_dir / PAGE_NAME, report_file(history, summary))
    return summary
