"""YAML of a user: no tags, no repeated keys, and bounds on depth and on values, with those that aliases repeat."""

from __future__ import annotations

from typing import Any

import yaml

_MOST_BYTES, _MOST_DEPTH, _MOST_VALUES = 4 << 20, 100, 200_000


class _Loader(yaml.SafeLoader):
    """YAML without tags and without repeated keys, which YAML forbids and PyYAML accepts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise _error(f"'{key.value}' is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """The value of a text.

    Raises:
        yaml.YAMLError: It is invalid, or beyond the bounds.
        ValueError: A number or a date in it cannot be read.
    """
    if len(text) > _MOST_BYTES:
        raise yaml.YAMLError(f"it has {len(text)} characters, and at most {_MOST_BYTES}")
    _check_bounds(text)
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader


def _check_bounds(text: str) -> None:
    """Walk through the parser's events, which come one by one: nothing is built before its bound is checked.

    An alias counts as much as the value that it repeats.
    """
    # Of each open list and mapping: its anchor, and the values in it so far.
    begun: list[tuple[str | None, int]] = [(None, 0)]
    sizes: dict[str, int] = {}
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, 1))
            if len(begun) > _MOST_DEPTH:
                raise _error(f"nested deeper than {_MOST_DEPTH}", event.start_mark)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = begun.pop()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise _error(f"*{event.anchor} has no value before it, or is a part of it", event.start_mark)
            anchor, size = None, sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        outer, size_outer = begun[-1]
        begun[-1] = outer, size_outer + size
        if size_outer + size > _MOST_VALUES:
            raise _error(f"more than {_MOST_VALUES:,} values, with those that aliases repeat", event.start_mark)


def _error(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, place)
