"""The trial of a loss of the user's own on made-up tensors: does a step mean the same however it is cut?

`python -m gspo.learner.objective.loss_trial FILE ENTRY REFERENCE` prints the first broken rule as JSON, or `null`.
loss_file.py runs it before the start. It cannot see what only other values would show.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo.learner.objective.own_loss import LossBatch, LossError, call_loss, load_function

# Tokens of the made-up answers. One has none that counts, and one has observations in its middle.
_LENGTHS, _EMPTY, _GAPS = (12, 7, 1, 5, 9, 3, 12, 6), 3, 4
_ADVANTAGES = (1.5, -0.7, 0.0, 1.0, 0.4, -2.0, 0.0, 0.9)
# Far from the old policy on either side; exp(40) is 2e17.
_FAR, _FAR_UP, _FAR_DOWN = 40.0, 1, 5
# Of the largest value of a row: rounding differs between cuts.
_TOLERANCE = 1e-4
_MASK_FIX = "Use torch.where(batch.mask_BT, x, 0) before sums over tokens, and divide by the counted tokens"
_ROWS_FIX = "Compute each rollout's losses from its own row alone"


class _Outcome(NamedTuple):
    """Losses, gradient in logp and figures, [B, T] each, with 0 outside the mask for losses and figures."""

    l_BT: Tensor
    gradient_BT: Tensor
    figures: dict[str, Tensor]

    def matrices(self) -> dict[str, Tensor]:
        """Every matrix by the name that a message has for it."""
        named = {f"figure {name}": x_BT for name, x_BT in self.figures.items()}
        return {"loss": self.l_BT, "gradient": self.gradient_BT, **named}


def try_loss(path: Path, entry: str, *, reference: bool) -> None:
    """Call the function on made-up batches.

    Raises:
        LossError: The first rule that it breaks.
    """
    function = load_function(path, entry)
    batch = made_up_batch(reference=reference)

    whole = _outcome(function, batch, path)
    if not whole.gradient_BT.any():
        raise LossError(
            "has a gradient of zero at every token", "Compute the losses from batch.logp_BT, without .detach()"
        )
    _compare(
        whole,
        _outcome(function, batch, path),
        "the same batch a second time",
        0.0,
        "Use no random numbers, and keep no state",
    )
    for what, tried, rows, fix in _variants(batch):
        try:
            seen = _outcome(function, tried, path)
        except LossError as error:
            raise LossError(f"{error.rule}, for {what}", error.fix) from error
        _compare(_part(whole, rows, tried.mask_BT.shape[1]), seen, what, _TOLERANCE, fix)


def _variants(batch: LossBatch) -> Iterator[tuple[str, LossBatch, list[int], str]]:
    """The same rollouts in another form: its name, the batch, the rows that it has, and the fix for a difference."""
    rows, width = list(range(len(_LENGTHS))), batch.mask_BT.shape[1]
    yield "other values outside mask_BT", _other_outside(batch), rows, _MASK_FIX
    yield "more padding on the right", _padded(batch, 5), rows, _MASK_FIX
    yield "the rollouts in another order", _taken(batch, rows[::-1], width), rows[::-1], _ROWS_FIX
    for row in rows:
        what = f"a rollout of {int(batch.mask_BT[row].sum())} token(s) alone"
        yield what, _taken(batch, [row], _LENGTHS[row]), [row], _ROWS_FIX
    # The ranks' number of micro-batches is the same, so one of them may have nothing that counts.
    yield "a batch in which no token counts", _without_tokens(batch), [_EMPTY] * len(rows), _ROWS_FIX


def made_up_batch(*, reference: bool) -> LossBatch:
    """Eight rollouts of 0 to 12 tokens: advantages of both signs and zero, ratios near 1 and very far from it."""
    random, shape = torch.Generator().manual_seed(0), (len(_LENGTHS), max(_LENGTHS))

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=random)

    mask_BT = torch.arange(shape[1])[None] < torch.tensor(_LENGTHS)[:, None]
    mask_BT[_EMPTY], mask_BT[_GAPS, 2:4] = False, False
    old_BT = -2.0 - normal(0.7).abs()
    logp_BT = old_BT + normal(0.05)
    old_BT[_FAR_UP, 2], logp_BT[_FAR_UP, 2] = -_FAR - 0.01, -0.01
    old_BT[_FAR_DOWN, 0], logp_BT[_FAR_DOWN, 0] = -0.01, -_FAR - 0.01
    # Under a token-level penalty or a discount, advantages differ within an answer.
    advantage_B1 = torch.tensor(_ADVANTAGES)[:, None]
    advantage_BT = advantage_B1 * (1 + normal(0.1))
    entropy_BT, reference_BT = normal(1.0).abs(), logp_BT + normal(0.2)
    return LossBatch(logp_BT, old_BT, advantage_BT, mask_BT, entropy_BT, reference_BT if reference else None)


def _outcome(function: Callable[..., Any], batch: LossBatch, path: Path) -> _Outcome:
    """Call the function once, with weights on the tokens that no aggregation has in common."""
    logp_BT, mask_BT = batch.logp_BT.clone().requires_grad_(), batch.mask_BT
    # A view, as the trainer's log-probs are no leaf of the graph.
    copied = batch.each(lambda _name, x_BT: x_BT.clone())._replace(logp_BT=logp_BT * 1.0)
    l_BT, figures = call_loss(function, copied, path)
    for name, before, after in zip(batch._fields, batch, copied, strict=True):
        if before is not None and after is not None and not torch.equal(before, after):
            raise LossError(f"changes batch.{name}", "Work on a copy, without in-place operations")
    if not l_BT.requires_grad:
        if mask_BT.any():
            raise LossError("has no gradient in logp_BT", "Compute the losses from batch.logp_BT, without .detach()")
        gradient_BT = torch.zeros_like(logp_BT)
    else:
        weight_BT = 1.0 + torch.arange(mask_BT.shape[1]).remainder(3)
        torch.where(mask_BT, l_BT * weight_BT, 0.0).sum().backward()  # type: ignore[no-untyped-call]
        gradient_BT = torch.zeros_like(logp_BT) if logp_BT.grad is None else logp_BT.grad
    counted = {name: torch.where(mask_BT, x_BT.detach(), 0.0) for name, x_BT in figures.items()}
    result = _Outcome(torch.where(mask_BT, l_BT.detach(), 0.0), gradient_BT, counted)
    _check_values(result, batch)
    return result


def _check_values(result: _Outcome, batch: LossBatch) -> None:
    """Every value is finite, and no token that does not count has a gradient."""
    for what, x_BT in result.matrices().items():
        if not x_BT.isfinite().all():
            row, token = (~x_BT.isfinite()).nonzero()[0].tolist()
            seen = ", ".join(
                f"{name.removesuffix('_BT')} {float(value[row, token]):.4g}"
                for name, value in zip(batch._fields, batch, strict=True)
                if value is not None and name != "mask_BT"
            )
            where = "a token that counts" if batch.mask_BT[row, token] else "a token outside mask_BT"
            raise LossError(
                f"gives a {what} of {float(x_BT[row, token])} at {where} ({seen})",
                "Bound log-ratios before exp, such as x.clamp(-20, 20), and divide by counts.clamp(min=1)",
            )
    outside = float(torch.where(batch.mask_BT, 0.0, result.gradient_BT).abs().max())
    if outside:
        raise LossError(f"has a gradient of {outside:.3g} at a token outside mask_BT", _MASK_FIX)


def _compare(expected: _Outcome, seen: _Outcome, what: str, tolerance: float, fix: str) -> None:
    before, after = expected.matrices(), seen.matrices()
    if before.keys() != after.keys():
        raise LossError(f"returns other figures for {what}", "Return the same figures from every call")
    for name, x_BT in before.items():
        # Of the row: a ratio far from 1 must not hide a difference in another rollout.
        scale_B1 = x_BT.abs().amax(-1, keepdim=True)
        difference_BT = (after[name] - x_BT).abs()
        if (difference_BT > tolerance * scale_B1).any():
            place = int((difference_BT - tolerance * scale_B1).argmax())
            was, now = float(x_BT.flatten()[place]), float(after[name].flatten()[place])
            raise LossError(f"is not the same for {what}: the {name} of a token was {was:.6g} and is {now:.6g}", fix)


def _part(whole: _Outcome, rows: list[int], width: int) -> _Outcome:
    """These rows of an outcome, cut or filled up with 0 to a width."""

    def fitted(x_BT: Tensor) -> Tensor:
        return torch.nn.functional.pad(x_BT[rows], (0, max(0, width - x_BT.shape[1])))[:, :width]

    figures = {name: fitted(x_BT) for name, x_BT in whole.figures.items()}
    return _Outcome(fitted(whole.l_BT), fitted(whole.gradient_BT), figures)


def _taken(batch: LossBatch, rows: list[int], width: int) -> LossBatch:
    return batch.each(lambda _name, x_BT: x_BT[rows, :width])


def _padded(batch: LossBatch, more: int) -> LossBatch:
    return batch.each(lambda _name, x_BT: torch.nn.functional.pad(x_BT, (0, more)))


def _other_outside(batch: LossBatch) -> LossBatch:
    """The trainer passes 0 there, which would hide that a function reads it."""
    return batch.each(lambda name, x_BT: x_BT if name == "mask_BT" else torch.where(batch.mask_BT, x_BT, -3.0))


def _without_tokens(batch: LossBatch) -> LossBatch:
    return batch._replace(mask_BT=torch.zeros_like(batch.mask_BT)).counted()


def main() -> None:
    """Print the first broken rule with its fix as JSON, on a line of its own, or null."""
    path, entry, reference = sys.argv[1:]
    problem = None
    try:
        try_loss(Path(path), entry, reference=reference == "true")
    except LossError as error:
        problem = {"rule": error.rule, "fix": error.fix}
    sys.stdout.write(f"\n{json.dumps(problem)}\n")


if __name__ == "__main__":
    main()
