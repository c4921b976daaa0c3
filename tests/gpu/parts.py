"""The parts by name: what each shows, what it needs, how long it may take.

No part runs here. Neighbours: `__main__` chooses, child.py runs.
"""

from __future__ import annotations

from dataclasses import dataclass

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
