"""Shape checks: every public function refuses tensors of wrong shapes, by name.

Not a tensor library: one decorator.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def checked_shapes(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse tensors of other shapes than the suffixes of their parameters: `x_BT` is [B, T].

    Equal letters are equal sizes over all parameters. Those without a suffix are not looked at, nor is None.
    The decorated function raises ValueError for the first tensor that does not fit.
    """
    signature = inspect.signature(function)
    letters = {name: name.rpartition("_")[2] for name in signature.parameters}
    letters = {name: suffix for name, suffix in letters.items() if suffix and suffix.isupper()}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        _check({name: arguments[name] for name in letters if arguments.get(name) is not None}, letters)
        return function(*args, **kwargs)

    return checked


def _check(tensors: dict[str, Tensor], letters: dict[str, str]) -> None:
    first: dict[str, str] = {}  # letter -> the first parameter that has it
    for name, tensor in tensors.items():
        described = f"{name} has shape {tuple(tensor.shape)}"
        if tensor.dim() != len(letters[name]):
            raise ValueError(f"{described}; it must be [{', '.join(letters[name])}]")
        for place, letter in enumerate(letters[name]):
            other = first.setdefault(letter, name)
            if tensor.shape[place] != tensors[other].shape[letters[other].index(letter)]:
                shapes = " and ".join(dict.fromkeys(f"[{', '.join(letters[it])}]" for it in (name, other)))
                raise ValueError(f"{described}, {other} has {tuple(tensors[other].shape)}; they must be {shapes}")
