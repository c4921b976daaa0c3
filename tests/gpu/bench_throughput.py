"""`vllm bench throughput` as a process: `python -m tests.gpu.bench_throughput WORDS...`.

It runs the module behind vLLM's command line, which the CPU build has under another package name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.gpu.part_run import PartRun


def bench_throughput(case: PartRun, *, timeout_s: float = 200.0) -> float:
    """Sampled tokens a second of vLLM's own benchmark, with the sizes, the model and the engine arguments of a part."""
    sizes, output = case.sizes, case.folder / f"{case.part}-bench.json"
    arguments: dict[str, Any] = {
        "model": case.model,
        "dtype": "bfloat16",
        "dataset-name": "random",
        "random-input-len": sizes.prompt_tokens,
        "random-output-len": sizes.answer_tokens,
        "num-prompts": sizes.num_requests,
        "num-warmups": min(16, sizes.num_requests),
        "max-num-seqs": sizes.num_requests,
        "max-model-len": sizes.prompt_tokens + sizes.answer_tokens + 64,
        "output-json": output,
    }
    arguments |= {name.replace("_", "-"): value for name, value in case.engine_arguments.items()}
    if not case.on_gpu:
        arguments |= {"enforce-eager": True, "kv-cache-memory-bytes": 1 << 28}
    words = [word for name, value in arguments.items() for word in _words(name, value)]
    subprocess.run([sys.executable, "-m", "tests.gpu.bench_throughput", *words], timeout=timeout_s, check=True)
    return sizes.num_requests * sizes.answer_tokens / float(json.loads(output.read_text())["elapsed_time"])


def _words(name: str, value: Any) -> list[str]:
    """An argument of vLLM's command line; a switch has no value."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]


def main() -> None:
    """Run vLLM's benchmark."""
    from vllm.benchmarks.throughput import add_cli_args  # here: the part's own process imports vLLM for itself
    from vllm.benchmarks.throughput import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    bench(parser.parse_args())


if __name__ == "__main__":
    main()
