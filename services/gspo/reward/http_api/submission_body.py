"""Reading a submission: JSON, or a form with the source as an uploaded file."""

from __future__ import annotations

import codecs
import io
import json
import tokenize
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from gspo.common.network.http_server import FORM_TYPE, JSON_TYPE
from gspo.reward.http_api.access import MAX_BODY_BYTES, RestRefusalError, cut, refusal_of
from gspo.reward.http_api.views import ProblemView
from gspo.reward.registry.submission import Submission

_REFERENCE = "#/components/schemas/{model}"
# As Python names them. Others are not text, or take long to decode.
_ENCODINGS = ("utf-8", "utf-8-sig", "ascii", "iso8859-1", "cp1252")
_JSON_FIELDS = ("limits", "tests", "activate")
SOURCE = """def reward(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
"""
ENVIRONMENT = """def reset(task):
    return {"left": task["tries"], "number": task["number"]}, "Guess a number."

def step(state, action):
    state["left"] -= 1
    right = action.strip() == str(state["number"])
    return state, "Right." if right else "No.", float(right), right or state["left"] == 0
"""
EXAMPLES: dict[str, Any] = {
    "a reward function with a test case": {
        "value": {
            "name": "exact",
            "source": SOURCE,
            "limits": {"timeout_s": 5.0},
            "tests": [{"input": {"prompt": "2+2=", "completion": "4", "answer": "4"}, "expected": 1.0}],
        }
    },
    "an environment": {
        "value": {
            "name": "guess",
            "kind": "environment",
            "source": ENVIRONMENT,
            "tests": [{"input": {"task": {"number": 7, "tries": 2}, "actions": ["3", "7"]}, "expected": 1.0}],
        }
    },
}


async def read_submission(request: Request) -> Submission:
    """The submission of a request.

    Raises:
        RestRefusalError: It is neither JSON nor a form, or a field is missing, unknown or wrong.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == JSON_TYPE:
        text = await request.body()
    elif kind == FORM_TYPE:
        text = json.dumps(await _read_form(request)).encode()
    else:
        raise RestRefusalError(
            415, f"send {JSON_TYPE}, or {FORM_TYPE} with the source as `file`; this is {cut(kind) or 'neither'}"
        )
    try:
        return Submission.model_validate_json(text)
    except ValidationError as error:
        refusal = refusal_of(error.errors(include_url=False, include_context=False, include_input=False))
        raise RestRefusalError(422, refusal.detail, refusal.problems) from error


async def _read_form(request: Request) -> dict[str, Any]:
    """The fields of a form; limits and tests are JSON in it."""
    fields: dict[str, Any] = {}
    async with request.form(max_files=1, max_fields=16, max_part_size=MAX_BODY_BYTES) as form:
        for name, value in form.multi_items():
            if isinstance(value, str):
                fields[name] = _read_field(name, value)
            elif name == "file":
                fields["source"] = await _read_source(value)
            else:
                raise _wrong(name, "is a file; the source is uploaded as `file`")
    return fields


def _read_field(name: str, value: str) -> Any:
    if name not in _JSON_FIELDS:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, f"is not JSON ({error})") from error


async def _read_source(file: UploadFile) -> str:
    data = await file.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if codecs.lookup(encoding).name not in _ENCODINGS:
            raise _wrong("file", f"is written in the encoding {encoding[:100]!r}; save it as UTF-8")
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, ValueError) as error:
        raise _wrong("file", f"is not Python text ({error})") from error


def _wrong(field: str, text: str) -> RestRefusalError:
    field = cut(field)
    return RestRefusalError(422, f"{field}: {text}", [ProblemView(rule="field", text=f"{field}: {text}", field=field)])


def submission_schemas() -> dict[str, Any]:
    """The parts of a submission by name, as a description refers to them."""
    parts: dict[str, Any] = Submission.model_json_schema(ref_template=_REFERENCE)["$defs"]
    return parts


def request_body() -> dict[str, Any]:
    """The body of a submission as /docs describes it."""
    schema = Submission.model_json_schema(ref_template=_REFERENCE)
    schema.pop("$defs")
    form = {
        "type": "object",
        "required": ["name", "file"],
        "additionalProperties": False,
        "properties": {
            "name": schema["properties"]["name"],
            "file": {"type": "string", "format": "binary", "description": "The Python file"},
            "kind": schema["properties"]["kind"],
            "entry": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,99}$"},
            "limits": {"type": "string", "description": "As JSON", "examples": ['{"timeout_s": 5}']},
            "tests": {"type": "string", "description": "As JSON", "examples": ["[]"]},
            "activate": {"type": "string", "enum": ["true", "false"]},
        },
    }
    content = {JSON_TYPE: {"schema": schema, "examples": EXAMPLES}, FORM_TYPE: {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}
