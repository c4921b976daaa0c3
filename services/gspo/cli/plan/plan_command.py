"""The arguments of `gspo plan`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# Of a plan for another machine.
_PLANNED_GPUS = 8

Model = Annotated[
    str, typer.Argument(help="Folder of the model, its config.json, or a hub's name; no weights are needed or fetched.")
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs in all. By default those of this machine, or 8.")]
GpuMemory = Annotated[
    float | None, typer.Option(help="Memory of a GPU in GB, such as 80. By default this machine's GPU is meant.")
]
CardName = Annotated[str | None, typer.Option(help="The GPU, such as 'H100 NVL'; --gpu-memory implies one.")]
GpusPerHost = Annotated[int, typer.Option(min=1, help="GPUs of a host; more GPUs are on several hosts.")]
HostMemoryGib = Annotated[
    float | None,
    typer.Option(
        min=1, help="Memory of a host in GiB. By default what this machine has free, or twice that of the host's GPUs."
    ),
]
HostCores = Annotated[
    int | None,
    typer.Option(min=1, help="Processor cores of a host. By default those of this machine, or enough of them."),
]
Context = Annotated[
    str | None,
    typer.Option(
        help="Longest rollout in tokens, prompt and answer, such as 32k. By default 8k, or what the model reads."
    ),
]
Groups = Annotated[int, typer.Option(min=1, help="Prompts in a step.")]
GroupSize = Annotated[int, typer.Option(min=1, help="Rollouts of a prompt.")]
MaxLag = Annotated[int, typer.Option(min=0, max=64, help="staleness.max_lag.")]
OnStale = Annotated[str, typer.Option(help="staleness.on_stale: wait, drop or mask.")]
Teacher = Annotated[str | None, typer.Option(help="A teacher, as teacher.path; named as the model.")]
LoraRank = Annotated[int, typer.Option(min=0, help="Rank of adapters; 0 trains all weights.")]
AnswerTokens = Annotated[
    float | None, typer.Option(min=1, help="Mean tokens of an answer; a quarter of the longest by default.")
]
PromptTokens = Annotated[float | None, typer.Option(min=1, help="Tokens of a prompt; half of the longest by default.")]
RatesFile = Annotated[Path | None, typer.Option(help="Results of make gpu-test, in place of the rates of other GPUs.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's code.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]
Write = Annotated[Path | None, typer.Option(help="Write the configuration to this file.")]


def plan(
    model: Model,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    card: CardName = None,
    gpus_per_host: GpusPerHost = 8,
    host_memory: HostMemoryGib = None,
    host_cores: HostCores = None,
    context: Context = None,
    groups: Groups = 64,
    group_size: GroupSize = 8,
    max_lag: MaxLag = 1,
    on_stale: OnStale = "wait",
    lora: LoraRank = 0,
    teacher: Teacher = None,
    answer_tokens: AnswerTokens = None,
    prompt_tokens: PromptTokens = None,
    rates: RatesFile = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """Plan a run before anything is started: does it fit, and by advice how long is a step and how stale are rollouts.

    Example: [bold]gspo plan Qwen/Qwen3-8B --gpus 8 --gpu-memory 80 --context 32k[/]
    """
    from gspo.cli.plan.plan_request import PlanRequest
    from gspo.cli.plan.plan_tables import plan_json, print_plan
    from gspo.cli.plan.planner import gpus_here, make_plan, parse_tokens, write_plan
    from gspo.common.host.machine import GIB, free_memory

    card, num_here = gpus_here() if card is None and gpu_memory is None else (card, 0)
    if num_here:
        host_memory = host_memory or free_memory() / GIB
        host_cores = host_cores or len(os.sched_getaffinity(0))
    request = PlanRequest(
        model=model,
        num_gpus=gpus or num_here or _PLANNED_GPUS,
        gpu=card,
        gpu_gb=gpu_memory,
        gpus_per_host=gpus_per_host,
        host_gib=host_memory,
        host_cores=host_cores,
        context=parse_tokens(context) if context else 0,
        groups=groups,
        group_size=group_size,
        max_lag=max_lag,
        on_stale=on_stale,
        lora_rank=lora,
        teacher=teacher,
        mean_answer=answer_tokens,
        mean_prompt=prompt_tokens,
        results=rates,
        trust_remote_code=trust_remote_code,
    )
    planned = make_plan(request, lambda text: print(text, file=sys.stderr))
    if write is not None:
        write_plan(planned, write)
    print(plan_json(planned)) if as_json else print_plan(planned, Console())
