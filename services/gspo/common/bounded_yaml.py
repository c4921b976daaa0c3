"""YAML of a user: no tags, no repeated keys, and bounds on depth and on values, with those that aliases repeat."""

from typing import Any

import yaml

_MOST_BYTES, _MOST_DEPTH, _MOST_VALUES = 1 << 20, 100, 50_000


class _Loader(yaml.SafeLoader):
    """YAML without tags, keys of several values, and repeated keys, which YAML forbids and PyYAML accepts.

    The parser's events come one by one, so a bound is checked before a value beyond it is built. An alias counts as
    much as the value that it repeats.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0
        self._sizes: dict[str, int] = {}  # of the values that have an anchor

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._sizes:
                raise _error(f"*{event.anchor} has no value before it, or is a part of it", event.start_mark)
            self._count(self._sizes[event.anchor], event)
            return super().compose_node(parent, index)
        before = self._num_values
        self._count(1, event)
        self._depth += 1
        if self._depth >= _MOST_DEPTH and isinstance(event, yaml.CollectionStartEvent):
            raise _error(f"nested deeper than {_MOST_DEPTH}", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._num_values - before
        return node

    def _count(self, num_values: int, event: Any) -> None:
        self._num_values += num_values
        if self._num_values > _MOST_VALUES:
            raise _error(f"more than {_MOST_VALUES:,} values, with those that aliases repeat", event.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys all differ."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key is one word or number, and this is a list or a mapping", key.start_mark)
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
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader


def _error(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, place)
