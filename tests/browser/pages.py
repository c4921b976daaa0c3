"""In a real browser: a page of another site changes nothing and reads nothing, and our own page works.

`make browser-test` runs it on a machine with Chromium. The services are real processes, without a token, as for one
user. It tests each kind of request that the browser sends, not those that the browser itself forbids.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from tests.browser.attacker_site import AttackerSite, attacker_site
from tests.browser.chromium import LOAD_S, browser, text_of
from tests.support.service_process import make_run, service_process
from tests.support.tiny_model import make_tiny_model

RUN = "looked-at"
SOURCE = "def reward(completions):\n    return [0.0] * len(completions)\n"
# Every way in which a page can send a request without asking the service first.
ATTACK = """
  const submission = new FormData();
  submission.append("name", "victim");
  submission.append("activate", "true");
  submission.append("file", new Blob(["def reward(completions): return [1.0] * len(completions)"]), "r.py");
  const text = JSON.stringify({name: "victim", source: "def reward(completions): return [2.0]", activate: true});
  const silent = {mode: "no-cors"};
  await attempt("form data", () => call("http://REWARD/v1/rewards", {...silent, body: submission}));
  await attempt("text", () => call("http://REWARD/v1/rewards", {...silent, body: text}));
  await attempt("form", () => framed("http://REWARD/v1/rewards", "multipart/form-data",
                                     {name: "victim", source: "def reward(completions): return [3.0]"}));
  await attempt("plain form", () => framed("http://COORDINATOR/v1/pause", "text/plain", {}));
  await attempt("pause", () => call("http://COORDINATOR/v1/pause", silent));
  await attempt("stop", () => call("http://COORDINATOR/v1/stop", {...silent, body: '{"reason": "mine"}'}));
  await attempt("beacon", () => navigator.sendBeacon("http://COORDINATOR/v1/pause", "{}"));
  await attempt("json", () => call("http://COORDINATOR/v1/pause",
                                   {body: "{}", headers: {"content-type": "application/json"}}));
  await attempt("read", () => call("http://COORDINATOR/v1/state", {method: "GET"}));
  await attempt("websocket", () => opened("ws://REWARD/readyz"));
"""
SENT = {"form data", "text", "form", "plain form", "pause", "stop", "beacon", "json", "read", "websocket"}
# The script of a page whose own name has become the service's: for the browser it calls itself.
REBOUND = """
  const json = {headers: {"content-type": "application/json"}};
  await attempt("pause", () => call("/v1/pause", {...json, body: "{}"}));
  await attempt("read", () => call("/v1/state", {method: "GET"}));
  await attempt("ready", () => call("/readyz", {method: "GET"}));
"""


@pytest.fixture(scope="module")
def addresses(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Service -> HOST:PORT of its HTTP API, of a run whose reward service knows a function `victim`."""
    folder: Path = tmp_path_factory.mktemp("browser")
    make_tiny_model(folder / "model")
    config = make_run(folder, folder / "model", name=RUN)
    with service_process("coordinator", config, redis_url), service_process("reward", config, redis_url):
        addresses = asyncio.run(_addresses(redis_url, Keys(config.name)))
        url = f"http://{addresses['reward']}/v1/rewards"
        httpx.post(url, json={"name": "victim", "source": SOURCE}, timeout=60).raise_for_status()
        yield addresses


async def _addresses(redis_url: str, keys: Keys) -> dict[str, str]:
    redis = connect_redis(redis_url)
    try:
        async with asyncio.timeout(120):
            while True:
                instances = [i for i in await list_instances(redis, keys) if i.grpc or i.service == "coordinator"]
                addresses = {instance.service: instance.http for instance in instances}
                if {"coordinator", "reward"} <= addresses.keys():
                    return addresses
                await asyncio.sleep(0.2)
    finally:
        await redis.aclose()


@pytest.fixture(scope="module")
def site() -> Iterator[AttackerSite]:
    with attacker_site() as site:
        yield site


async def _state(addresses: dict[str, str], redis_url: str) -> tuple[str, list[str], bool]:
    """The state that an attack would change: the active version, the names, whether the run is paused."""
    rewards = httpx.get(f"http://{addresses['reward']}/v1/rewards", timeout=30).json()["rewards"]
    (victim,) = (reward for reward in rewards if reward["name"] == "victim")
    redis = connect_redis(redis_url)
    try:
        paused = await redis.exists(Keys(RUN).paused)
    finally:
        await redis.aclose()
    return victim["active"], sorted(reward["name"] for reward in rewards), bool(paused)


def _refused(addresses: dict[str, str], reason: str) -> float:
    """Requests that both services have refused for a reason."""
    texts = [httpx.get(f"http://{address}/metrics/", timeout=30).text for address in addresses.values()]
    line = rf'^gspo_calls_refused_total{{protocol="http",reason="{reason}"}} (\S+)$'
    return sum(float(number) for text in texts for number in re.findall(line, text, re.MULTILINE))


async def _shown(site: AttackerSite, host: str, profile: Path) -> dict[str, Any]:
    """The report of the site's page on its attempts, after a user has opened it."""
    async with browser(profile, f"http://{host}:{site.port}/"):
        return await asyncio.to_thread(site.outcomes.get, timeout=LOAD_S)


@pytest.mark.parametrize("origin", ["evil.example", "localhost"])
async def test_a_page_of_another_origin_changes_and_reads_nothing(
    addresses: dict[str, str], site: AttackerSite, redis_url: str, tmp_path: Path, origin: str
) -> None:
    script = ATTACK.replace("REWARD", addresses["reward"]).replace("COORDINATOR", addresses["coordinator"])
    # Another site, and the same site on another port.
    site.script = script if origin == "evil.example" else script.replace("127.0.0.1", "localhost")
    before, refused = await _state(addresses, redis_url), _refused(addresses, "cross_site")
    outcome = await _shown(site, origin, tmp_path)
    assert set(outcome) == SENT
    assert (outcome["json"], outcome["read"], outcome["websocket"]) == ("TypeError", "TypeError", "refused")
    assert await _state(addresses, redis_url) == before
    assert _refused(addresses, "cross_site") - refused >= len(SENT), "each was sent, and refused for that reason"


async def test_a_name_that_becomes_ours_gets_nothing(
    addresses: dict[str, str], site: AttackerSite, redis_url: str, tmp_path: Path
) -> None:
    site.script, site.becomes = REBOUND, addresses["coordinator"]
    before = await _state(addresses, redis_url)
    outcome = await _shown(site, "rebound.example", tmp_path / "rebound")
    assert outcome == {"pause": 421, "read": 421, "ready": 421}
    assert await _state(addresses, redis_url) == before
    # The same page at an address, as ours would be: only the name was refused above.
    outcome = await _shown(site, "127.0.0.1", tmp_path / "own")
    assert (outcome["pause"], outcome["read"]) == (200, 200)
    assert (await _state(addresses, redis_url))[2]


async def test_the_page_of_the_description_works(addresses: dict[str, str], tmp_path: Path) -> None:
    page = await text_of(f"http://{addresses['reward']}/docs", tmp_path)
    assert "/v1/rewards/{name}/activate" in page.replace("\u200b", ""), "it has read /openapi.json"
