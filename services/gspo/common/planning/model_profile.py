"""The sizes of a model that its costs follow from, as `python -m gspo.learner.model.profile FOLDER` counts them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from gspo.common.config.engines import SPREAD_STAGE
from gspo.common.errors import EXIT_BAD_INPUT, InputError
from gspo.common.host.module_command import module_command
from gspo.common.model.files import other_folder, read_model_config, refuse_other_model
from gspo.common.model.heads import heads_divide
from gspo.common.planning.flops import ModelFlops

_PROGRAM = "gspo.learner.model.profile"
_MODEL_CODE = Path(__file__).parents[2] / "learner" / "model"
# Qwen3-32B takes 9 s of processor time on a core of an AMD EPYC, half of it the imports.
_LIMIT_S = 600.0
_LAST_LINES = 3


@dataclass(frozen=True)
class ModelProfile:
    """Counts of one model. Numbers are elements of tensors unless their name says bytes.

    Attributes:
        model_type: As in config.json.
        num_layers: Decoder layers.
        num_parameters: All parameters, tied ones once.
        num_rounded: Parameters of linear layers and experts, which products in bfloat16 round.
        largest_weight: The parameters of the largest tensor, such as a vocabulary or all experts of a layer.
        flops: Operations of the whole model, all of it trained.
        vocabulary, width: Rows and columns of the output layer.
        num_kv: Keys and values that one token leaves in the cache, over all layers; 1 without attention.
        num_heads, num_kv_heads: Heads of queries, and of keys and values (1 under multi-head latent attention). 0
            and 1 without attention.
        num_adapted: Parameters of adapters (LoRA) of all linear layers, for each of their rank.
        max_positions: Longest sequence that the model reads; 0 if config.json has none.
        saved_bytes: Bytes that the forward pass saves for the backward pass, without gradient checkpointing and
            without the output layer. By dtype of the products: of each micro-batch, of each token, and of each pair of
            tokens in a row. The last is 0 but for a model with an attention of its own.
        shares_lines: Whether ranks can share packed lines.
        teacher: Profile of the frozen model that the learner loads beside this one (teacher.path).
    """

    model_type: str
    num_layers: int
    num_parameters: int
    num_rounded: int
    largest_weight: int
    flops: ModelFlops
    vocabulary: int
    width: int
    num_kv: int
    num_heads: int
    num_kv_heads: int
    num_adapted: int
    max_positions: int
    saved_bytes: dict[str, tuple[float, float, float]]
    shares_lines: bool = True
    teacher: ModelProfile | None = None

    @property
    def is_mixture(self) -> bool:
        """Whether a token is multiplied by a part of the layers alone: those of its experts."""
        return self.num_parameters > 2 * (self.flops.body + self.flops.head)

    def compiles_under(self, zero_stage: int) -> bool:
        """Whether torch can compile the layers: not those of a mixture, and not parts of weights."""
        return not self.is_mixture and zero_stage < SPREAD_STAGE

    def flops_under(self, lora_rank: int) -> ModelFlops:
        """The model's operations with adapters of all linear layers, and of the whole model at rank 0."""
        if not lora_rank:
            return self.flops
        adapters = lora_rank * self.num_adapted
        return replace(self.flops, trained_body=adapters, trained_head=0.0)

    def can_share(self, num_ranks: int) -> bool:
        """Whether so many ranks can share a packed line (learner.sequence_ranks)."""
        return num_ranks == 1 or (self.shares_lines and heads_divide(self.num_heads, self.num_kv_heads, num_ranks))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> ModelProfile:
        """The profile that `to_json` wrote.

        Raises:
            ValueError: The line holds another content.
        """
        try:
            fields = json.loads(line)
            flops = fields.pop("flops")
            attention = {int(window): width for window, width in flops.pop("attention").items()}
            saved = {
                dtype: (fixed, a_token, a_pair) for dtype, (fixed, a_token, a_pair) in fields.pop("saved_bytes").items()
            }
            teacher = fields.pop("teacher", None)
            fields["teacher"] = teacher and cls.from_json(json.dumps(teacher))
            return cls(**fields, flops=ModelFlops(**flops, attention=attention), saved_bytes=saved)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{line[:80]!r} is no profile") from error


def profile_model(
    folder: Path, *, trust_remote_code: bool = False, note: Callable[[str], None] = lambda _: None
) -> ModelProfile:
    """The profile of a folder in which config.json is enough.

    Torch counts it in a process of its own, in seconds. The result is kept in the user's cache, for the same
    config.json and the same code.

    Args:
        note: Called with a sentence before a count.

    Raises:
        InputError: The folder has no config.json, transformers cannot make its model, or a run would refuse it.
    """
    config = folder / "config.json"
    if not config.is_file():
        fix = other_folder(folder, "Give a folder with the config.json of a model")
        raise InputError(str(folder), "has no config.json", fix)
    refuse_other_model(str(folder), read_model_config(folder), trust_remote_code=trust_remote_code)
    kept = None if trust_remote_code else _cache_file(config.read_bytes())
    if kept is not None and (profile := _read(kept)):
        return profile
    note(f"counting the sizes of {folder} by its config.json, which takes seconds and is kept for the next time")
    line = _count(folder, trust_remote_code)
    profile = ModelProfile.from_json(line)
    if kept is not None:
        with suppress(OSError):  # a home that is full or read-only
            kept.parent.mkdir(parents=True, exist_ok=True)
            scratch = kept.with_suffix(f".{os.getpid()}")
            scratch.write_text(line)
            scratch.replace(kept)
    return profile


def _read(kept: Path) -> ModelProfile | None:
    with suppress(OSError, ValueError):
        return ModelProfile.from_json(kept.read_text())
    return None


def _cache_file(config: bytes) -> Path:
    """Where the profile of a config.json is kept, by its bytes and those of the code that counts."""
    digest = hashlib.sha256(config + Path(__file__).read_bytes())
    for package in ("torch", "transformers"):
        digest.update(version(package).encode())
    for source in sorted(_MODEL_CODE.glob("*.py")):
        digest.update(source.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "gspo" / "profiles" / f"{digest.hexdigest()}.json"


def _count(folder: Path, trust_remote_code: bool) -> str:
    command = [*module_command(_PROGRAM), str(folder), *(["--trust-remote-code"] if trust_remote_code else [])]
    try:
        # It counts the same without a GPU, and other programs may need the GPU.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        rule = f"the count of this model took more than {_LIMIT_S:g} s"
        raise InputError(str(folder), rule, "Try again on a machine that is less busy") from error
    lines = done.stdout.splitlines()
    if done.returncode == EXIT_BAD_INPUT and lines:
        raise InputError(*json.loads(lines[-1]))
    if done.returncode or not lines:
        reason = " ".join(_error_lines(done.stderr))
        rule = f"the sizes of the model of its config.json cannot be counted ({reason})"
        fix = "Correct the file, or name a model that transformers knows. `gspo run` starts without this count"
        if "trust_remote_code" in reason:
            fix = (
                "If you trust the Python code of this model, allow it: model.trust_remote_code, or --trust-remote-code"
            )
        raise InputError(str(folder), rule, fix)
    return lines[-1]


def _error_lines(stderr: str) -> list[str]:
    """The error's own lines: those behind a traceback's indented ones, or the last ones of an indented error."""
    lines = stderr.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return [line.strip() for line in (lines[max(frames, default=-1) + 1 :] or lines)[-_LAST_LINES:]]
