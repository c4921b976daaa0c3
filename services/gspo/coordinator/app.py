"""The coordinator service: serves the run's HTTP API, reads the prompts, runs its loop or one evaluation."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog

from gspo.common.errors import InputError
from gspo.common.network.http_server import BoundedBodies
from gspo.common.service.app import App, Service, Work, run_app
from gspo.common.telemetry import metrics
from gspo.common.telemetry.findings import Finding
from gspo.common.telemetry.first_answers import first_answers
from gspo.coordinator.data.prompt_checks import FAULTS, prompt_findings
from gspo.coordinator.data.prompts import PromptSet, held_out_prompts, training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler, run_standalone_evaluation
from gspo.coordinator.groups.ledger import GroupLedger
from gspo.coordinator.http_api import RecentRollouts, RunViews, make_http_api
from gspo.coordinator.loop import Coordinator
from gspo.coordinator.page.page_access import PageAccess
from gspo.coordinator.page.page_api import PagePassage
from gspo.coordinator.page.page_process import PageProcess
from gspo.environments.mcp.tool_listing import with_listed_tools
from gspo.runlog.checks import write_checks
from gspo.runlog.run_log import RunLog

# A stop with its reason, or a view to open.
MAX_BODY_BYTES = 16 * 2**10
log = structlog.get_logger()


async def run_coordinator(service: Service) -> None:
    """Serve the run's HTTP API, and coordinate a run or one evaluation to its end.

    Raises:
        InputError: Prompts cannot be used, or an evaluation has no held-out prompts.
    """
    await run_app(service, startup, http_port=service.config.services.coordinator_port, authorizes_itself=True)


@asynccontextmanager
async def startup(service: Service) -> AsyncIterator[App]:
    """Open the HTTP API, which shows the startup too, then read the prompts."""
    if service.options.evaluate and not service.config.evaluation.files:
        raise InputError("evaluation.prompts", "is not set, and it is what --evaluate measures on", "Set it")
    views, rollouts = RunViews(service), RecentRollouts(service.redis, service.keys, service.config.sources)
    page = PageProcess(service.options.run_dir)
    api = BoundedBodies(make_http_api(service, views, rollouts), MAX_BODY_BYTES)
    passage = BoundedBodies(PagePassage(page), MAX_BODY_BYTES)
    is_tls = service.config.services.tls.is_on
    service.http_api = PageAccess(api, passage, service.options.token, is_tls=is_tls)
    service.activity.set("busy", "listing the tools of MCP servers")
    service.config = await with_listed_tools(service.config, is_patient=True)
    training, held_out, views.checks = await asyncio.to_thread(_read_prompts, service)
    facts: Callable[[], dict[str, Any]] = dict
    scheduler = views.scheduler = EvaluationScheduler(service, held_out)
    if training is None:  # one evaluation of the given model: no learner, no groups
        main: Work = partial(run_standalone_evaluation, service, scheduler)
    else:
        views.coordinator = Coordinator(service, GroupLedger(service, training), scheduler, views.checks)
        main = views.coordinator.run
        curriculum = views.coordinator.curriculum

        def facts() -> dict[str, Any]:
            return {"curriculum": curriculum()}

    yield App(main, background={"rollouts": rollouts.run, "page": page.run}, facts=facts, sets_ready=True)


def _read_prompts(service: Service) -> tuple[list[PromptSet] | None, dict[str, PromptSet], list[Finding]]:
    """Training prompts by source, held-out ones by file, and the findings of the start; runs in a thread.

    There are no training prompts where this is only an evaluation.
    """

    def progress(done: int, total: int) -> None:
        service.activity.set("busy", "reading prompts", f"({done} of {total} checked)")

    service.activity.set("busy", "reading prompts", "(loading the tokenizer)")
    tokenizer = load_tokenizer(service.config.model)
    training = None if service.options.evaluate else training_prompts(service.config, tokenizer, progress)
    held_out = held_out_prompts(service.config, tokenizer, progress)
    run_log = RunLog(service.options.run_dir)
    for start in run_log.data_files()[-1:]:
        for change in start.changes:
            log.warning("data_files_changed", step=start.step, detail=change)
    checks = prompt_findings(training or (), held_out.values())
    for record in run_log.steps()[:1]:
        checks += first_answers(record.figures, service.config) if record.step == 1 else []
    write_checks(run_log.folder, checks)
    for check in checks:
        metrics.FINDING.labels(check.rule).set(check.rule in FAULTS)
    for prompts in training or ():
        log.info("prompts", key=prompts.key, usable=len(prompts), skipped=prompts.num_skipped)
    return training, held_out, checks
