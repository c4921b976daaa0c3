"""A loss of the user's own: its inputs, its file as a module, and its checked calls.

Not here: the trial before the start (loss_trial.py), and the file's copy in the run directory (loss_file.py).
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo.common.config.evaluation import MOST_PARTS
from gspo.common.errors import InputError
from gspo_core.stats import Stats, mean_stats

# Beginning of the names of the loss's own figures among those of a step.
OWN_FIGURE = "loss_"
_KEY, _MODULE = "algorithm.loss.path", "own_loss_of_the_user"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_FIX = "Correct the function"


class LossBatch(NamedTuple):
    """The inputs of a loss: B rollouts of a step, T positions after the prompt. All [B, T], float32, on one device.

    Attributes:
        logp_BT: The learner's log-probs, the only input with a gradient.
        old_logp_BT: Denominator of the ratio, by algorithm.old_logprobs.
        advantage_BT: With every correction that the keys of `algorithm` ask for.
        mask_BT: Bool: the policy's tokens that count. Elsewhere every other input is 0.
        entropy_BT: That of the policy's distribution at each token.
        reference_BT: Log-probs of the original model; None unless algorithm.loss.reference or a KL key asks for it.
    """

    logp_BT: Tensor
    old_logp_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    entropy_BT: Tensor
    reference_BT: Tensor | None = None

    def counted(self) -> LossBatch:
        """The same with 0 outside the mask."""
        return self.each(lambda name, x_BT: x_BT if name == "mask_BT" else torch.where(self.mask_BT, x_BT, 0.0))

    def each(self, change: Callable[[str, Tensor], Tensor]) -> LossBatch:
        """The batch with every tensor that is there changed, by its name."""
        return self._replace(**{name: change(name, x_BT) for name, x_BT in self._asdict().items() if x_BT is not None})


class LossError(Exception):
    """The function broke a rule. `fix` says what helps."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


class OwnLoss:
    """The user's function, called once for each micro-batch.

    Args:
        path: Its file, which is run here.
        entry: Its name in the file.

    Raises:
        InputError: The file cannot be run, or has no such function.
    """

    def __init__(self, path: Path, entry: str) -> None:
        self._path, self._entry = path, entry
        self._names: tuple[str, ...] | None = None
        try:
            self._function = load_function(path, entry)
        except LossError as error:
            raise InputError(_KEY, f"{path}: {error.rule}", error.fix) from error

    def __call__(self, batch: LossBatch) -> tuple[Tensor, Stats]:
        """The loss of each token [B, T], and the sums of the function's own figures.

        Raises:
            InputError: The function raised, or did not return what it must.
        """
        try:
            l_BT, figures = call_loss(self._function, batch, self._path)
            # Ranks add up the figures name by name.
            if self._names not in (None, tuple(sorted(figures))):
                raise LossError(
                    f"returned the figures {', '.join(figures) or 'none'}, and {', '.join(self._names)} before", _FIX
                )
        except LossError as error:
            raise InputError(_KEY, f"{self._path}: {self._entry} {error.rule}", error.fix) from error
        self._names = tuple(sorted(figures))
        sums = [mean_stats(f"{OWN_FIGURE}{name}_mean", x_BT, batch.mask_BT) for name, x_BT in figures.items()]
        return l_BT, {key: value for stats in sums for key, value in stats.items()}


def load_function(path: Path, entry: str) -> Callable[..., Any]:
    """The function `entry` of a file, whose text runs as a module; nothing is written beside it.

    Raises:
        LossError: The file cannot be read or run, or has no such function.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LossError(f"cannot be read ({error})", "Give the path of a Python file") from error
    module = ModuleType(_MODULE)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - the user's own code, as documented
    except Exception as error:
        raise LossError(f"cannot be run: {_described(error)}", f"Correct the file{_places(error, path)}") from error
    function = getattr(module, entry, None)
    if not callable(function):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise LossError(
            f"has no function '{entry}' (algorithm.loss.entry)", f"It has: {', '.join(names) or 'no function at all'}"
        )
    return function  # type: ignore[no-any-return]


def call_loss(function: Callable[..., Any], batch: LossBatch, path: Path) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss of each token, and the function's own figures by name, all [B, T].

    Raises:
        LossError: It raised, or returned something else.
        OutOfMemoryError: torch has no memory left, which is not the function's fault.
    """
    try:
        returned = function(batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise LossError(f"raised {_described(error)}", f"{_FIX}{_places(error, path)}") from error
    l_BT, figures = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    _check_matrix("a loss", l_BT, batch)
    if not isinstance(figures, Mapping):
        raise LossError(f"returned figures as {type(figures).__name__}", "Return (losses, {name: tensor [B, T]})")
    if len(figures) > MOST_PARTS:
        raise LossError(f"returned {len(figures)} figures", f"Return at most {MOST_PARTS}")
    for name, x_BT in figures.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise LossError(
                f"returned a figure named {name!r}", "Use 1 to 40 of a-z, 0-9 and _, beginning with a letter"
            )
        _check_matrix(f"the figure {name}", x_BT, batch)
    return l_BT, figures


def _check_matrix(what: str, value: Any, batch: LossBatch) -> None:
    expected = list(batch.mask_BT.shape)
    fix = "Return one floating-point number for each token, [B, T], or a tuple of that and a dict of figures"
    if not isinstance(value, Tensor):
        raise LossError(f"returned {what} of type {type(value).__name__}, not a tensor", fix)
    if list(value.shape) != expected or not value.is_floating_point():
        kind = str(value.dtype).removeprefix("torch.")
        raise LossError(f"returned {what} of shape {list(value.shape)} and {kind}; its batch has {expected}", fix)
    if value.device != batch.mask_BT.device:
        where = f"on {value.device}, and the batch is on {batch.mask_BT.device}"
        raise LossError(f"returned {what} {where}", "Make new tensors on the device of batch.logp_BT")


def _described(error: Exception) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())


def _places(error: Exception, path: Path) -> str:
    """The user's own lines of a traceback, each on a line of its own; empty if it has none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    lines = [f"\n  {path}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
    return f":{''.join(lines)}" if lines else ""
