"""Backward passes with types: torch's own `backward` has none, and its `grad` may be None."""

from torch import Tensor


def backward(loss: Tensor, gradient: Tensor | None = None) -> None:
    """Add the gradient of `loss` up in its leaves."""
    loss.backward(gradient)  # type: ignore[no-untyped-call]


def grad_of(leaf: Tensor) -> Tensor:
    """The gradient of a leaf that a backward pass has reached."""
    assert leaf.grad is not None
    return leaf.grad
