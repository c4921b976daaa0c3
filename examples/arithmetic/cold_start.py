"""Makes what the arithmetic example starts from: a small model, its training prompts, its held-out problems.

Not part of the package, and no reinforcement learning: `gspo run` does that with the files written here.
problems.py says what is asked, near_miss.py trains the model, chat_tokenizer.py spells its text.

OUT_DIR/model/  prompts.jsonl  eval.jsonl  cold_start.json (what it was made with; written last)
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from problems import split_problems, write_jsonl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# small_model.py is in the folder above, or where PYTHONPATH says.
sys.path.append(str(Path(__file__).resolve().parents[1]))

MARKER = "cold_start.json"
SOURCES = ("cold_start.py", "problems.py", "chat_tokenizer.py", "near_miss.py")
console = Console()


def fingerprint(seed: int, threads: int, experts: int, steps: int | None = None, *, teaches: bool = False) -> str:
    """A digest of everything that decides the result: arguments, these scripts, libraries."""
    here = Path(__file__).resolve().parent
    parts = [f"seed={seed} threads={threads} experts={experts} python={sys.version_info[:2]}"]
    parts += [f"steps={steps}"] if steps else []
    parts += ["teacher"] if teaches else []
    parts += [f"{name}=={version(name)}" for name in ("torch", "transformers", "tokenizers")]
    shared = getattr(find_spec("small_model"), "origin", None)
    parts += [(here / name).read_text(encoding="utf-8") for name in (*SOURCES, shared or "small_model.py")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(out_dir: Path, digest: str) -> bool:
    """Whether OUT_DIR already holds exactly what this call would make."""
    try:
        return bool(json.loads((out_dir / MARKER).read_text(encoding="utf-8"))["fingerprint"] == digest)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError):
        return False


def refuse_foreign(out_dir: Path) -> None:
    """Ends with exit code 2 where OUT_DIR holds something that this script did not write."""
    if not out_dir.exists() or (out_dir / MARKER).is_file() or (out_dir.is_dir() and not any(out_dir.iterdir())):
        return
    raise typer.BadParameter(
        f"{out_dir} exists and has no {MARKER}: it is not a cold start, and is not overwritten. "
        "Name an empty or new folder."
    )


@contextmanager
def replacing(out_dir: Path) -> Iterator[Path]:
    """A new folder that takes OUT_DIR's place when the block ends well, and is gone when it does not."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        yield fresh
        if out_dir.exists():
            out_dir.rename(scratch / "replaced")
        fresh.rename(out_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def make(
    folder: Path, seed: int, threads: int, experts: int, steps: int | None = None, *, teaches: bool = False
) -> dict[str, object]:
    """Writes prompts and model to `folder`; returns what is worth knowing about the result."""
    # Threads that sleep at a barrier instead of spinning: on shared cores spinning costs many times the work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported here so that a call with nothing to do need not wait seconds for torch.
    import torch
    from chat_tokenizer import build_tokenizer
    from near_miss import OFFSETS, Schedule, build_arithmetic_model, encode, exact_probability, train
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    problems, held_out = split_problems(seed)
    write_jsonl(folder / "prompts.jsonl", problems)
    write_jsonl(folder / "eval.jsonl", held_out)
    tokenizer = build_tokenizer()
    model = build_arithmetic_model(tokenizer, experts, scale=2 if teaches else 1)
    schedule = Schedule(**({"num_steps": steps} if steps else {}), **({"exact_share": 1.0} if teaches else {}))
    with progress() as bar:
        task = bar.add_task("cold start", total=schedule.num_steps, exact=0.0)
        exact_probability_trained = train(
            model,
            *encode(tokenizer, problems),
            schedule,
            seed,
            lambda step, exact: bar.update(task, completed=step, exact=exact),
        )
    disable_progress_bar()  # transformers' own, for one small file
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    token_NT, label_NT = encode(tokenizer, held_out)
    return {
        "num_steps": schedule.num_steps,
        "exact_probability": exact_probability_trained,
        "held_out_exact_probability": exact_probability(model, token_NT[:: len(OFFSETS)], label_NT[:: len(OFFSETS)]),
        "num_parameters": model.num_parameters(),
    }


def progress() -> Progress:
    """A bar with the probability of the exact answer on training problems."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed} of {task.total}, exact {task.fields[exact]:.2f}"),
        TimeElapsedColumn(),
        console=console,
    )


def main(
    out_dir: Annotated[Path, typer.Argument(help="Folder to make: model/, prompts.jsonl, eval.jsonl")],
    seed: Annotated[int, typer.Option(min=0, help="Held-out split, initial weights, order of the data")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; another number gives other last bits")] = 2,
    experts: Annotated[int, typer.Option(min=0, help="Experts of a layer, two a token; 0 is a dense model")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training, fewer for a trial")] = None,
    teacher: Annotated[bool, typer.Option(help="Twice as wide, and without near misses: for distill.yaml")] = False,
) -> None:
    """Makes a small model that adds two numbers with near misses, and the problems to improve it on.

    A second call with the same arguments returns at once.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out_dir = out_dir.resolve()
    digest = fingerprint(seed, threads, experts, steps, teaches=teacher)
    if is_current(out_dir, digest):
        console.print(f"{out_dir}: up to date")
        return
    refuse_foreign(out_dir)
    started = time.monotonic()
    with replacing(out_dir) as folder:
        made = make(folder, seed, threads, experts, steps, teaches=teacher)
        facts = {"fingerprint": digest, "seed": seed, "threads": threads, "experts": experts, **made}
        (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    console.print(
        f"{out_dir}: {made['num_parameters']:,} parameters, {made['num_steps']} steps, held-out accuracy when sampled "
        f"{made['held_out_exact_probability']:.2f}, {time.monotonic() - started:.0f} s",
        soft_wrap=True,  # a log's line is one line
    )


if __name__ == "__main__":
    typer.run(main)
