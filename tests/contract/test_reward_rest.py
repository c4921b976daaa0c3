"""The REST API against its own description: schemathesis makes calls from /openapi.json and checks the replies.

test_submissions.py tests the effect of the calls. This file takes well under a minute.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gspo.common.streams.instances import wait_for_instance
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from tests.support.service_process import make_run, service_process

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SOURCE = "def reward(completions):\n    return [0.0] * len(completions)\n"


@pytest.fixture(scope="module")
def api_url(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A reward service with two functions, one of them submitted."""
    folder: Path = tmp_path_factory.mktemp("rest")
    limits = {"calls_per_minute": 1_000_000, "timeout_s": 5.0}
    config = make_run(folder, folder / "model", name="described", reward=limits)
    with service_process("reward", config, redis_url, log=folder / "log"):
        url = f"http://{asyncio.run(_address(redis_url, config.name))}"
        httpx.post(f"{url}/v1/rewards", json={"name": "known", "source": SOURCE}, timeout=30).raise_for_status()
        yield url


async def _address(redis_url: str, run: str) -> str:
    redis = connect_redis(redis_url)
    try:
        return (await wait_for_instance(redis, Keys(run), "reward", 60)).http
    finally:
        await redis.aclose()


@pytest.mark.parametrize("name", [None, "known"])
def test_every_call_answers_as_described(api_url: str, name: str | None) -> None:
    """Generated calls of every operation; once more about a name that is there."""
    description = schemathesis.openapi.from_url(f"{api_url}/openapi.json")
    operations = [it.ok() for it in description.get_all_operations() if isinstance(it, Ok)]
    for operation in operations:
        if name is None or "{name}" in operation.path:
            call_it(operation, name)
    assert len(operations) == 12


def call_it(operation: Any, name: str | None) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    def check(case: Any) -> None:
        if name is not None:
            case.path_parameters = {**(case.path_parameters or {}), "name": name}
        case.call_and_validate(checks=CHECKS, timeout=30)

    check()


def test_the_description_has_worked_examples(api_url: str) -> None:
    schema = httpx.get(f"{api_url}/openapi.json", timeout=30).json()
    content = schema["paths"]["/v1/rewards"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "multipart/form-data"}
    for example in content["application/json"]["examples"].values():
        reply = httpx.post(f"{api_url}/v1/rewards", json=example["value"], timeout=60)
        assert reply.status_code == 201, reply.text
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(schema)))
    assert referred <= set(schema["components"]["schemas"])
    assert "swagger" in httpx.get(f"{api_url}/docs", timeout=30).text
