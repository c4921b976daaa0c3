"""What `guess`, `calculator` and `long` share: a small model that is taught to talk, and the call of `gspo run` on it.

Not part of the package, and no reinforcement learning. Each example says in its cold_start.py what its teacher says,
and which prompts there are. A teacher's conversation is made of the very tokens that a generator would make of it.
"""

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

# small_model.py is beside this file.
sys.path.append(str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parent.parent
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IGNORE = -100
MARKER = "cold_start.json"
STEPS_HELP = "Steps of supervised training; the lesson's by default, and fewer for a trial"
# Options of every cold_start.py.
Folder = Annotated[Path, typer.Argument(help="Folder to make: model/ and prompts")]
Seed = Annotated[int, typer.Option(min=0, help="Lessons, initial weights, order")]
Steps = Annotated[int | None, typer.Option(min=1, help=STEPS_HELP)]
Experts = Annotated[int, typer.Option(min=0, help="Experts of a layer, two a token; 0 is a dense model")]


@dataclass(frozen=True)
class Talk:
    """One conversation of the teacher: the policy's turns, and what is said between them (text, or messages)."""

    prompt: list[dict[str, Any]]
    turns: list[str]
    observations: list[Any]


@dataclass(frozen=True)
class LessonPart:
    """A part of a lesson.

    Attributes:
        talk: Draws a conversation.
        batch_size: Conversations in a step.
        share: That of the lesson's steps.
    """

    talk: Callable[[random.Random], Talk]
    batch_size: int = 64
    share: float = 1.0


@dataclass(frozen=True)
class Lesson:
    """What an example teaches, and how long.

    Attributes:
        words: Texts that become one token each; every other byte is a token.
        parts: One after the other.
        tools: Descriptions that the chat template gets.
        role: That of an observation that is text.
        num_steps: That of supervised training.
        sizes: Keyword arguments of small_model.Sizes.
    """

    words: Sequence[str]
    parts: Sequence[LessonPart]
    tools: Sequence[dict[str, Any]] = ()
    role: str = "user"
    num_steps: int = 300
    learning_rate: float = 0.01
    sizes: dict[str, Any] = field(default_factory=dict)

    def part(self, step: int) -> LessonPart:
        """The part of a step, counted from 1."""
        ends = accumulate(part.share * self.num_steps for part in self.parts)
        return next((part for part, end in zip(self.parts, ends, strict=True) if step <= end), self.parts[-1])


def build_tokenizer(words: Sequence[str]) -> Any:
    """Byte tokens, the chat markers, the role names and `words`; `<|im_end|>` ends a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (START, END, PAD)])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*ROLES, *words)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


class Spelling:
    """Makes tokens and labels of conversations; what was spelt once is not spelt again."""

    def __init__(self, tokenizer: Any, lesson: Lesson) -> None:
        from gspo.generation.rollout.chat_turns import ChatTurns

        self._tokenizer, self._lesson = tokenizer, lesson
        self._turns = ChatTurns(tokenizer, lesson.tools)
        self._known: dict[str, list[int]] = {}

    def encode(self, talk: Talk) -> tuple[list[int], list[int]]:
        """Tokens and labels; labels are IGNORE but on the policy's turns."""
        tokens = self._cached(json.dumps(talk.prompt), lambda: self._prompt(talk.prompt))
        labels = [IGNORE] * len(tokens)
        for number, said in enumerate(talk.turns):
            turn = self._cached(said, lambda said=said: self._encode(f"{said}{END}"))
            tokens, labels = tokens + turn, labels + turn
            if number < len(talk.observations):
                observation = talk.observations[number]
                between = self._cached(json.dumps([observation]), lambda seen=observation: self._between(seen))
                tokens, labels = tokens + between, labels + [IGNORE] * len(between)
        return tokens, labels

    def _cached(self, key: str, spell: Callable[[], list[int]]) -> list[int]:
        if key not in self._known:
            self._known[key] = spell()
        return self._known[key]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        tools = list(self._lesson.tools) or None
        return self._encode(
            self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        )

    def _between(self, observation: Any) -> list[int]:
        return self._turns.between(observation, self._lesson.role, self._tokenizer.eos_token_id)


def teach(folder: Path, lesson: Lesson, seed: int, threads: int = 2) -> dict[str, Any]:
    """Train a small model on the teacher's conversations and save it to `folder`/model; facts about it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin at a barrier take a shared core for nothing
    import torch
    from small_model import Sizes, build_model, build_optimizers, predict, update
    from torch.nn.functional import cross_entropy
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    disable_progress_bar()
    draw, tokenizer = random.Random(seed), build_tokenizer(lesson.words)
    spelling = Spelling(tokenizer, lesson)
    model = build_model(tokenizer, Sizes(**lesson.sizes))
    optimizers, loss = build_optimizers(model, lesson.learning_rate), None
    for step in range(1, lesson.num_steps + 1):
        part = lesson.part(step)
        rows = [spelling.encode(part.talk(draw)) for _ in range(part.batch_size)]
        width = max(len(tokens) for tokens, _ in rows)
        token_BT = torch.tensor([tokens + [tokenizer.pad_token_id] * (width - len(tokens)) for tokens, _ in rows])
        label_BT = torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in rows])
        logits, imbalance = predict(model, token_BT)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), label_BT[:, 1:].flatten(), ignore_index=IGNORE)
        update(model, optimizers, loss + imbalance, step, lesson.num_steps)
        if step % 50 == 0:
            print(f"cold start: step {step} of {lesson.num_steps}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {"num_steps": lesson.num_steps, "loss": loss.item() if loss is not None else None}


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """One line a record."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def cold_start(
    folder: Path,
    lesson: Lesson,
    files: dict[str, Sequence[dict[str, Any]]],
    seed: int,
    sources: Sequence[Path],
    keys: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Make `folder` with model and prompts, unless these very sources made it before.

    It appears whole: what an interrupted call leaves is beside it, and the next call removes that.

    Args:
        files: Records by the name of the file that they go to.
        sources: Files that decide the result, beside these shared ones.
        keys: Those of the run's configuration, by section, where they follow from the lesson.
    """
    folder, here = folder.resolve(), Path(__file__).resolve()
    arguments = f"{seed} {lesson.num_steps} {lesson.sizes} {files}"
    made_of = _digest(arguments, (here, here.with_name("small_model.py"), *sources))
    if _made_of(folder) == made_of:
        print(f"{folder}: up to date")
        return
    if folder.exists() and not (folder / MARKER).is_file() and any(folder.iterdir()):
        print(f"error: {folder} exists and is no cold start. Name an empty or new folder", file=sys.stderr)
        sys.exit(2)
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, records in files.items():
        write_jsonl(fresh / name, records)
    began = time.monotonic()
    facts = teach(fresh, lesson, seed)
    facts |= {"seed": seed, "seconds": round(time.monotonic() - began, 1), "made_of": made_of, "keys": keys or {}}
    (fresh / MARKER).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    print(f"{folder}: {facts['num_steps']} steps, loss {facts['loss']:.3f}, {facts['seconds']:.0f} s")


def _digest(arguments: str, sources: Sequence[Path]) -> str:
    texts = [arguments, *(path.read_text(encoding="utf-8") for path in sources)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _made_of(folder: Path) -> str | None:
    """What a cold start was made of; None for another example's, or none."""
    try:
        return str(json.loads((folder / MARKER).read_text(encoding="utf-8")).get("made_of"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def run(here: Path, folder: Path, runs: Path, seed: int, steps: int | None, file: str, external: bool) -> int:
    """`gspo run` on a configuration of the example and this cold start; its exit code.

    Args:
        external: Play the configuration's agent by `gspo agent`, in a process beside the run.
    """
    config = yaml.safe_load((here / file).read_text(encoding="utf-8"))
    config["name"] = f"{here.name}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    config["seed"] = seed
    config["run"]["directory"] = str(runs)
    for section in ("environment", "agent"):
        if "path" in config.get(section, {}):
            config[section]["path"] = str(here / config[section]["path"])
    for function in config.get("reward", {}).get("functions", []):
        if "path" in function:
            function["path"] = str(here / function["path"])
    for section, keys in json.loads((folder / MARKER).read_text(encoding="utf-8"))["keys"].items():
        config[section] |= keys
    if steps is not None:
        config["run"]["total_steps"] = steps
    path = folder / "config.yaml"
    gspo = [sys.executable, "-m", "gspo.cli"]
    agent = play_outside(config) if external else []
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    if not agent:
        return subprocess.run([*gspo, "run", path], check=False, cwd=ROOT).returncode
    with (folder / "agent.log").open("w") as log:
        playing = subprocess.Popen([*gspo, *agent], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        return subprocess.run([*gspo, "run", path], check=False, cwd=ROOT).returncode
    finally:
        playing.terminate()
        playing.wait(30)


def play_outside(config: dict[str, Any]) -> list[str]:
    """Let workers of the user play the rollouts; the words of `gspo agent` that are one."""
    agent = config["agent"]
    path, workers = agent.pop("path"), agent.pop("workers")
    agent.pop("memory_mb")
    agent["external"] = True
    with socket.create_server(("127.0.0.1", 0)) as free:
        config["services"] = {"gateway_port": free.getsockname()[1]}
    url = f"http://127.0.0.1:{config['services']['gateway_port']}"
    return ["agent", path, "--url", url, "--rollouts", str(workers)]


def demo(example: Path, meaning: str, file: str = "config.yaml") -> None:
    """The command of an example: its cold start, then `gspo run` on it. Ends the process with that run's exit code.

    Args:
        example: Its folder, with cold_start.py and config.yaml.
        meaning: What --help says it does.
        file: Its configuration.
    """

    def main(
        context: typer.Context,
        seed: Annotated[
            int, typer.Option(min=0, help="Everything that is drawn: lessons, weights, order, samples")
        ] = 0,
        steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; config.yaml's by default")] = None,
        runs: Annotated[Path, typer.Option(help="Folder for the run directory")] = ROOT / "runs",
        cache: Annotated[Path, typer.Option(help="Folder for cold starts")] = ROOT / ".cache" / example.name,
        cold_start_steps: Steps = None,
        external: Annotated[bool, typer.Option(help="Play an agent by `gspo agent`, beside the run")] = False,
    ) -> None:
        folder = (cache / "-".join([f"seed-{seed}", *(word.lstrip("-") for word in context.args)])).resolve()
        options = ["--seed", str(seed), *context.args]
        options += ["--steps", str(cold_start_steps)] if cold_start_steps else []
        done = subprocess.run([sys.executable, example / "cold_start.py", folder, *options], check=False)
        raise typer.Exit(done.returncode or run(example, folder, runs.resolve(), seed, steps, file, external))

    main.__doc__ = f"{meaning} Further options, such as --experts 16, are those of cold_start.py."
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    app()
