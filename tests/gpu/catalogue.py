"""The parts by name, and one of them as a process: `python -m tests.gpu.catalogue OPTIONS_JSON ANSWER_FILE`."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import json
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from gspo.common.config.schema import ModelConfig
from gspo.generation.engine.process import ForkedProcess

_ENGINES = ("torch", "transformers", "vllm")
_TRAINING = ("torch", "transformers", "deepspeed", "peft")
_BOTH = (*_ENGINES, "deepspeed")
_SAMPLING = ("prefill_flops_share", "decode_bytes_share", "decode_passes_s")
_PUSHING = ("stage_bytes_s", "load_bytes_s")
_COPYING = ("to_host_bytes_s", "pack_bytes_s")
# Rates that no part measures, and why.
NOT_ON_ONE_GPU = {"wire_bytes_s": "the network between hosts makes it; `make bench` has that of loopback"}


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        what: One line for people.
        goal: What its numbers stand beside.
        packages: What must be installed for it.
        module: That of tests/gpu/parts; empty where it has the part's name.
        rates: Those of cli/plan/rates.py that it measures, for `gspo plan`.
        on_cpu: Whether its code is tried with `--device cpu` unless it is named.
        beside: Whether it runs beside others: it judges results, and its seconds are upper bounds then.
        has_engine: Whether it starts an engine itself, one.
        least_s: It is not begun with less time left: estimated, for a GPU.
        limit_s: It is ended after so long.
    """

    name: str
    what: str
    goal: str
    packages: tuple[str, ...]
    module: str = ""
    rates: tuple[str, ...] = ()
    on_cpu: bool = True
    beside: bool = False
    has_engine: bool = False
    least_s: float = 60.0
    limit_s: float = 290.0


# The cheapest and most telling first: a machine may be lent for minutes.
_ALL = (
    Part(
        "attention",
        "packed attention, also over lines of 4k to 32k, and output layer of the learner in bfloat16; AdamW",
        "both faster than without the kernel, and than in float32",
        ("torch", "transformers"),
    ),
    Part(
        "fingerprint",
        "fingerprints of the tensors of a Qwen3-0.6B where they are: Triton's kernel and torch, against NumPy. Its "
        "tensors from shared memory to the GPU",
        "equal to the bit; the kernel at least 400 GB/s, the load 10",
        ("torch", "transformers", "triton"),
    ),
    Part(
        "step",
        "training steps of a Qwen3-0.6B at 4k tokens, in bfloat16, and where their time goes",
        "MFU at least 0.35; memory within 15 % of the plan",
        _TRAINING,
        rates=_COPYING,
    ),
    Part(
        "parity",
        "log-probs of vLLM and of the learner's model, in bfloat16",
        "standard deviation at most 0.05",
        _BOTH,
        beside=True,
        has_engine=True,
    ),
    Part(
        "parity_float32",
        "the log-probs again, in float32",
        "standard deviation at most 0.005",
        _BOTH,
        "parity",
        beside=True,
        has_engine=True,
    ),
    Part(
        "engine",
        "our engine beside `vllm bench throughput`, both without CUDA graphs",
        "at least 0.95 of its tokens a second",
        _ENGINES,
        rates=_SAMPLING,
        least_s=120,
        has_engine=True,
    ),
    Part(
        "push",
        "new weights while requests are in flight: digest, and the version of every token",
        "a stall of at most 0.1 s beside the load",
        _BOTH,
        rates=_PUSHING,
        beside=True,
        has_engine=True,
    ),
    Part(
        "requests",
        "the tests of requests in vLLM: pauses, spans of versions, stops, the salt of the prefix cache, draft tokens",
        "all pass",
        (*_BOTH, "pytest", "pytest_asyncio", "redis"),
        beside=True,
    ),
    Part(
        "changes",
        "the changes of a version, loaded into the weights in place, beside whole loads",
        "the same weights as a whole load, there and back; in at most half of its time",
        _BOTH,
        beside=True,
        has_engine=True,
    ),
    Part(
        "shared",
        "one GPU in shifts: vLLM sleeps, a step trains, vLLM wakes",
        "vLLM gives back at least 0.8 of its memory, and the learner all but 0.1 GiB",
        _BOTH,
        beside=True,
        has_engine=True,
    ),
    Part(
        "width",
        "training steps of 8 B's width with 9 layers at 4k tokens, and where their time goes",
        "MFU at least 0.5; memory within 15 % of the plan",
        _TRAINING,
        "step",
        rates=("train_flops_share", *_COPYING),
        least_s=120,
    ),
    Part(
        "mixture",
        "training steps of 30B-A3B's width with 4 layers at 4k tokens",
        "memory within 15 % of the plan",
        _TRAINING,
        "step",
        rates=("mixture_flops_share", *_COPYING),
        least_s=120,
    ),
    Part(
        "fp8",
        "rollouts in FP8, quantized by vLLM from pushed bfloat16 weights, with their noise",
        "the noise alone puts at most 0.33 of the sequences outside the clip",
        _BOTH,
        least_s=120,
        beside=True,
        has_engine=True,
    ),
    Part(
        "lora",
        "training steps of 8 B by LoRA at 4k tokens",
        "memory within 15 % of the plan",
        _TRAINING,
        "step",
        least_s=180,
        beside=True,
    ),
    Part(
        "repeat",
        "two training steps twice: whether their bits are the same, and which kernels are not deterministic",
        "all tensors equal",
        _TRAINING,
        beside=True,
    ),
    Part(
        "demo",
        "the arithmetic example, from its cold start to its report",
        "held-out accuracy rises by 0.05",
        (*_ENGINES, *_TRAINING, "redis", "fastapi"),
        "run",
        least_s=90,
        beside=True,
    ),
    Part(
        "run",
        "`gspo run` of a Qwen3-0.6B, 256 answers of 512 tokens a step, with CUDA graphs",
        "none: it shows",
        (*_ENGINES, *_TRAINING, "redis", "fastapi"),
        least_s=100,
    ),
    Part(
        "restart",
        "`gspo run` of a Qwen3-0.6B whose generator is killed twice: one GPU, three starts beside the learner",
        "none: it shows",
        (*_ENGINES, *_TRAINING, "redis", "fastapi"),
        "run",
        least_s=150,
    ),
    # The same code again: on a CPU it would show nothing new.
    Part(
        "push_mixture",
        "the push again, of a layer with the 128 experts of 30B-A3B",
        "a stall of at most 0.1 s beside the load",
        _BOTH,
        "push",
        on_cpu=False,
        least_s=150,
        beside=True,
        has_engine=True,
    ),
    Part(
        "changes_mixture",
        "the changes again, of a layer with the 128 experts of 30B-A3B",
        "the same weights as a whole load, there and back; in at most half of its time",
        _BOTH,
        "changes",
        on_cpu=False,
        beside=True,
        has_engine=True,
    ),
    # vLLM's build for CPUs cannot load it.
    Part(
        "parity_linear",
        "the log-probs again, of a Qwen3.5-0.8B with linear attention",
        "standard deviation at most 0.05",
        (*_BOTH, "fla"),
        "parity",
        on_cpu=False,
        beside=True,
        has_engine=True,
    ),
    Part(
        "engine_graphs",
        "the engine again, as vLLM starts by default: compiled, with CUDA graphs",
        "at least 0.95 of its tokens a second",
        _ENGINES,
        "engine",
        rates=_SAMPLING,
        on_cpu=False,
        least_s=180,
        has_engine=True,
    ),
    Part(
        "push_graphs",
        "the push again, compiled, with CUDA graphs",
        "a stall of at most 0.1 s beside the load",
        _BOTH,
        "push",
        rates=_PUSHING,
        on_cpu=False,
        least_s=150,
        has_engine=True,
    ),
)
PARTS = {part.name: part for part in _ALL}


def main() -> None:
    """Run the part and write its findings; whatever it raises is the reason of its failure."""
    options = json.loads(sys.argv[1])
    # Before anything here has threads. It imports vLLM at the same time as this process, as in the service.
    process = ForkedProcess(_import_engine) if PARTS[options["part"]].has_engine else None
    from tests.gpu.part_run import NotForThisCardError, PartRun  # here: who asks for the parts' names needs no torch

    # The log of a part that is ended says where it was. Not earlier: a look at stacks while torch compiles is a crash.
    faulthandler.register(signal.SIGTERM, chain=True)
    paths = {"folder": Path(options["folder"]), "answer": Path(sys.argv[2])}
    case = PartRun(**{**options, **paths, "process": process})
    reason = not_here = ""
    try:
        module = importlib.import_module(f"tests.gpu.parts.{PARTS[case.part].module or case.part}")
        done = module.run(case)
        if inspect.iscoroutine(done):
            asyncio.run(done)
        case.require_rates()
    except NotForThisCardError as error:
        not_here = str(error)
    except Exception as error:  # noqa: BLE001 - whatever ends a part is its result
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    case.write(reason, not_here)


def _import_engine() -> None:
    from gspo.generation.engine.startup import import_engine  # here: it imports vLLM

    import_engine(ModelConfig(path="."))  # the model may not be drawn yet


if __name__ == "__main__":
    main()
