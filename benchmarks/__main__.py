"""`python -m benchmarks [SECTION...]`: measure, section by section, and write docs/benchmarks.md.

The results of a section stay on disk, so each can be measured again alone. The machine should have no other work.
Further commands write pages of their own: `models`, `chaos` and `chaos-engines`.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from benchmarks import DOCS, RESULTS
from benchmarks.chaos.arithmetic import chaos_engines
from benchmarks.chaos.command import chaos
from benchmarks.engine.draft_rates import DRAFTS
from benchmarks.engine.token_rate import ENGINE
from benchmarks.gateway.overhead import GATEWAY
from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.other_work import OtherWork
from benchmarks.harness.page import write_page
from benchmarks.harness.section import Effort, PageSection, Record, load_results, save_results
from benchmarks.learner.logprobs import LOGPROBS
from benchmarks.learner.step_time import LEARNER
from benchmarks.pipeline.many_generators import GENERATORS
from benchmarks.pipeline.rollout_rate import PIPELINE
from benchmarks.push.weight_update import PUSH
from benchmarks.reward.sandbox_cost import REWARD
from benchmarks.system.curriculum_share import CURRICULUM
from benchmarks.system.distillation import DISTILLATION
from benchmarks.system.lag import LEARNING
from benchmarks.system.startup import START
from benchmarks.system.step_rate import SYSTEM
from benchmarks.tails.long_answers import TAIL
from benchmarks.view.page_time import VIEW
from gspo.cli.processes.exit_codes import RunError

SECTIONS = (
    *(ENGINE, DRAFTS, LEARNER, LOGPROBS, START, SYSTEM),
    *(TAIL, PIPELINE, GENERATORS, GATEWAY, REWARD, LEARNING, DISTILLATION, CURRICULUM, PUSH, VIEW),
)
_NAMES = ", ".join(section.name for section in SECTIONS)
_BUSY_SHARE = 0.1
console = Console()


class MeasureByDefault(TyperGroup):
    """A group whose words are sections unless the first one names a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command before the sections."""
        has_command = bool(args) and args[0] in {*self.commands, "--help"}
        return super().parse_args(ctx, args if has_command else ["measure", *args])


app = typer.Typer(cls=MeasureByDefault, help=__doc__, add_completion=False)


@app.command()
def measure(
    names: Annotated[list[str] | None, typer.Argument(metavar="SECTION", help=f"Of {_NAMES}; all by default")] = None,
    quick: Annotated[bool, typer.Option(help="Two rounds or steps of everything, to see that it works")] = False,
    steps: Annotated[int | None, typer.Option(min=4, help="Steps of each run in system (8) and learning (40)")] = None,
    page: Annotated[bool, typer.Option(help="Measure nothing: write the page from the results on disk")] = False,
) -> None:
    """Measure speed and learning on this machine, and write docs/benchmarks.md."""
    sections = {section.name: section for section in SECTIONS}
    if unknown := [name for name in names or () if name not in sections]:
        raise typer.BadParameter(f"{unknown[0]} is no section; there are {_NAMES}", param_hint="SECTION")
    results = RESULTS / "quick" if quick else RESULTS
    if not page:
        _measure([sections[name] for name in names or sections], results, Effort(quick, steps))
    measured = load_results(results)
    if not measured:
        raise typer.BadParameter(f"{results} holds no results; measure first", param_hint="--page")
    console.print(f"written: {write_page(SECTIONS, measured, results / 'page' if quick else DOCS)}")


def _measure(sections: list[PageSection], results: Path, effort: Effort) -> None:
    _warn_if_busy()
    cases = {section: list(section.measurements(effort)) for section in sections}
    columns = (BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"), TimeElapsedColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        bar = progress.add_task("measuring", total=sum(map(len, cases.values())))
        for section, measurements in cases.items():
            records: list[Record] = []
            for case in measurements:
                name = f"{section.name}: {case.label}"
                progress.update(bar, description=name)
                began = time.monotonic()
                try:
                    with OtherWork() as others:
                        record = case.measure(*case.arguments)
                    if case.by_clock and others.share > _BUSY_SHARE and not effort.quick:
                        raise MeasurementError(
                            f"it was disturbed, and has no number: other processes took {others.share:.0%} of the "
                            "machine's processors meanwhile. Measure it again without them"
                        )
                except (MeasurementError, RunError, TimeoutError) as error:
                    console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
                    raise typer.Exit(1) from error
                took_s = time.monotonic() - began
                records.append({"label": case.label, "took_s": took_s, **record})
                save_results(results, section.name, records)
                console.print(f"{name}: {took_s:.0f} s", style="dim")
                progress.advance(bar)


def _warn_if_busy() -> None:
    """Warn of other work on the machine before it takes the time of a measurement."""
    busy = psutil.cpu_percent(interval=1.0) / 100
    if busy > _BUSY_SHARE:
        text = f"the machine is {busy:.0%} busy with other things, and disturbed measurements give no numbers"
        console.print(text, style="yellow")


@app.command()
def models(kinds: Annotated[list[str] | None, typer.Argument(help="model_type; by default all")] = None) -> None:
    """Compare the log-probs of every architecture, and write docs/models.md if no type is named."""
    from benchmarks.learner.model_types import PAGE, examine_all, page

    verdicts = examine_all(kinds or ())
    if not kinds:
        PAGE.write_text(page(verdicts))


for command in (chaos, chaos_engines):
    app.command()(command)

if __name__ == "__main__":
    # A terminated benchmark ends its children as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
