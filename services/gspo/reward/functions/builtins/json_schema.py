"""Built-in `json_schema`: 1 if the answer is JSON that a schema allows, else 0.

The answer is JSON as a whole, or its last fenced block is.
"""

import json
from typing import Any

import regex
from jsonschema.validators import validator_for

_FENCED = regex.compile(r"```(?:json)?\s*\n(.*?)\n\s*```", regex.DOTALL)


def reward(completions: list[Any], json_schema: list[Any] | None = None, *, schema: Any = None) -> list[float]:
    """Validate each answer.

    Args:
        json_schema: The data set's column: one schema for each answer, as an object or as text.
        schema: One schema for all.

    Raises:
        ValueError: There is no schema.
    """
    schemas = [schema] * len(completions) if schema is not None else json_schema or []
    if not schemas:
        raise ValueError("there is no schema: give args.schema, or a column json_schema")
    return [_score(text_of(text), each) for text, each in zip(completions, schemas, strict=True)]


def _score(text: str, schema: Any) -> float:
    rules = json.loads(schema) if isinstance(schema, str) else schema
    validator = validator_for(rules)
    validator.check_schema(rules)
    fenced = _FENCED.findall(text)
    try:
        value = json.loads(fenced[-1] if fenced else text)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator(rules).is_valid(value))


def text_of(completion: Any) -> str:
    """An answer as text, also if it is a chat message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
