"""The parts by name, and one of them as a process: `python -m tests.gpu.catalogue OPTIONS_JSON ANSWER_FILE`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

_ENGINES = ("torch", "transformers", "vllm")
_TRAINING = ("torch", "transformers", "deepspeed", "peft")


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        what: One line for people.
        packages: What must be installed for it.
        on_cpu: Whether its code is tried with `--device cpu` unless it is named.
    """

    name: str
    what: str
    packages: tuple[str, ...]
    on_cpu: bool = True
    limit_s: float = 290.0


_ALL = (
    Part("engine", "vLLM starts and generates in bfloat16, without CUDA graphs", _ENGINES),
    Part("parity", "log-probs of vLLM and of the learner's model, in bfloat16 and float32", (*_ENGINES, "deepspeed")),
    Part("push", "new weights while requests are in flight: stall, digest, version of every token", _ENGINES),
    # The same code again: on a CPU it would show nothing new.
    Part("graphs", "the push again, as vLLM starts by default: compiled, with CUDA graphs", _ENGINES, on_cpu=False),
    Part("step", "one training step, and the copy of the policy that a push sends", _TRAINING),
    Part(
        "demo", "the arithmetic example, from its cold start to its report", (*_ENGINES, *_TRAINING, "redis", "fastapi")
    ),
)
PARTS = {part.name: part for part in _ALL}
# Parts that are another one's code.
_MODULES = {"graphs": "push"}


def main() -> None:
    """Run the part and write numbers and reason; whatever it raises is the reason."""
    from tests.gpu.part_run import PartRun  # here: whoever only asks for the parts' names needs no torch

    options, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    case = PartRun(options["part"], options["device"], Path(options["folder"]), options["engine"])
    reason = ""
    try:
        module = importlib.import_module(f"tests.gpu.parts.{_MODULES.get(case.part, case.part)}")
        done = module.run(case)
        if inspect.iscoroutine(done):
            asyncio.run(done)
    except Exception as error:  # noqa: BLE001 - whatever ends a part is its result
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    answer.write_text(json.dumps({"numbers": case.numbers, "reason": reason}))


if __name__ == "__main__":
    main()
