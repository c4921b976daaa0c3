"""The registry: what replicas share, what a wiped Redis costs, and many callers at a time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from gspo.reward.registry.records import ConflictError, Content, NotRegisteredError, Submission
from gspo.reward.registry.store import OfflineRegistry, Registry
from gspo_proto.rollout_pb2 import RewardUse
from tests.integration.reward.http_api.rest_client import NEWER, SOURCE, open_rest_client
from tests.support.reward_rollouts import make_rollout, reward_or_failure

pytestmark = pytest.mark.asyncio(loop_scope="function")


def submission(name: str = "exact", number: int = 0, *, activate: bool = False) -> Submission:
    return Submission(name=name, source=f"{SOURCE}# {number}\n", activate=activate)


def content(of: Submission) -> Content:
    return Content(version=of.version, kind=of.kind, source=of.source, entry="")


async def keep(registry: Registry, of: Submission, who: str = "ann") -> str:
    await registry.submit(of, content(of), who=who)
    return of.version


async def test_a_wiped_redis_gets_back_what_a_replica_has_on_disk(redis: Redis, tmp_path: Path) -> None:
    here, there = (Registry(redis, tmp_path / name, replica=name) for name in ("here", "there"))
    old, new = await keep(here, submission()), await keep(here, submission(number=1))
    await here.activate("exact", new, who="ann")
    assert (await there.resolve("exact")).version == new
    await there.copy.refresh()  # as it does every second
    await redis.flushall()
    # The other replica, which has only ever looked.
    assert (await there.resolve("exact")).version == new
    assert (await here.name("exact")).versions.keys() == {old, new}
    await redis.flushall()
    assert (await here.name("exact")).active == new
    assert [(line.action, line.was) for line in await here.audit("exact", 10)] == [
        ("activate", old),
        ("submit", ""),
        ("submit", ""),
    ]
    anew = Registry(redis, tmp_path / "anew", replica="anew")
    assert (await anew.resolve("exact", old[:12])).source == submission().source
    assert (await OfflineRegistry(tmp_path / "anew").resolve("exact")).version == new


async def test_an_older_copy_does_not_undo_a_newer_state(redis: Redis, tmp_path: Path) -> None:
    old, new = (Registry(redis, tmp_path / name, replica=name) for name in ("old", "new"))
    first = await keep(old, submission())
    second = await keep(new, submission(number=1, activate=True))
    await redis.flushall()
    await old.copy.refresh()  # knows the first version alone
    assert (await old.name("exact")).active == first
    await new.copy.refresh()
    assert (await old.name("exact")).active == second
    assert (await old.name("exact")).versions.keys() == {first, second}


async def test_replicas_that_change_one_name_at_once_lose_nothing(redis: Redis, tmp_path: Path) -> None:
    replicas = [Registry(redis, tmp_path / str(number), replica=str(number)) for number in range(4)]
    versions = await asyncio.gather(*(keep(replicas[number % 4], submission(number=number)) for number in range(20)))
    for registry in replicas:
        exact = await registry.name("exact")
        assert (set(exact.versions), exact.revision) == (set(versions), 20)
        assert len(await registry.audit("exact", 100)) == 20
    for number in range(4):
        lines = (tmp_path / str(number) / "audit.jsonl").read_text().splitlines()
        assert {json.loads(line)["replica"] for line in lines} == {str(number)}


async def test_two_redis_that_share_a_folder_agree(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    other = Redis.from_url(redis_url.replace("/0", "/1"), protocol=2)
    try:
        ours, theirs = Registry(redis, tmp_path, replica="ours"), Registry(other, tmp_path, replica="theirs")
        first = await keep(ours, submission())
        assert (await theirs.resolve("exact")).version == first
        second = await keep(theirs, submission(number=1, activate=True))
        assert (await ours.name("exact")).active == second
    finally:
        await other.aclose()


async def test_an_unknown_name_version_or_kind_is_refused(redis: Redis, tmp_path: Path) -> None:
    registry = Registry(redis, tmp_path, replica="test")
    with pytest.raises(NotRegisteredError, match="Nothing is registered yet"):
        await registry.resolve("exact")
    version = await keep(registry, submission())
    with pytest.raises(NotRegisteredError, match="Did you mean 'exact'"):
        await registry.resolve("exacd")
    with pytest.raises(NotRegisteredError, match="exact has no version 00000000; its newest are"):
        await registry.resolve("exact", "00000000")
    other = submission().model_copy(update={"kind": "environment"})
    with pytest.raises(ConflictError, match="holds functions of kind reward"):
        await registry.submit(other, content(other).model_copy(update={"kind": "environment"}), who="ann")
    with pytest.raises(ConflictError, match="is active, and not none"):
        await registry.activate("exact", version, who="ann", if_active="")


async def test_a_thousand_callers_lose_nothing(redis: Redis, tmp_path: Path) -> None:
    """Each submits one of 40 sources under one of 8 names, and activates its version only if it saw the last state.

    Some try the active version. No update is lost, and every version is readable.
    """
    names, sources = [f"f{number}" for number in range(8)], [f"{SOURCE}# {number}\n" for number in range(40)]
    swaps: list[tuple[str, str, str]] = []

    async with open_rest_client(tmp_path, redis, calls_per_minute=1_000_000) as (client, _, registry):

        async def one_caller(number: int) -> None:
            name = names[number % len(names)]
            reply = await client.post("", json={"name": name, "source": sources[number % len(sources)]})
            assert reply.status_code == 201, reply.text
            version, active = reply.json()["version"], (await client.get(f"/{name}")).json()["active"]
            await asyncio.sleep(number % 7 / 70)
            moved = await client.post(f"/{name}/activate", json={"version": version, "if_active": active})
            assert moved.status_code in (200, 409), moved.text
            if moved.status_code == 200:
                assert moved.json()["was"] == active
                swaps.append((name, active, version))
            if number % 10 == 0:
                tried = await client.post(f"/{name}/try", json={"rows": [{"completion": "4", "answer": "4"}]})
                assert tried.json()["results"][0]["reward"] == 1.0, tried.text

        await asyncio.gather(*(one_caller(number) for number in range(1000)))
        for name in names:
            registered = await registry.name(name)
            # From the first version on, each activation that was answered began where another had ended.
            own = [(before, after) for swapped, before, after in swaps if swapped == name]
            first = next(iter(registered.versions))
            ends = [first, *(after for _, after in own)]
            assert sorted([*(before for before, _ in own), registered.active]) == sorted(ends)
            assert registered.revision == len(registered.versions) + len(own)
            for version in registered.versions:
                source = (await client.get(f"/{name}/source", params={"version": version})).json()["source"]
                assert source in sources
        lines = [line for name in names for line in await registry.audit(name, 10_000)]
        assert sum(line.action == "submit" for line in lines) == 1000
        assert sum(line.action == "activate" for line in lines) == len(swaps)


async def test_a_removed_version_is_gone_everywhere_and_stays_so(redis: Redis, tmp_path: Path) -> None:
    here, there = (Registry(redis, tmp_path / name, replica=name) for name in ("here", "there"))
    first, second = await keep(here, submission()), await keep(here, submission(number=1))
    await keep(here, submission("other"))
    await there.copy.refresh()
    with pytest.raises(ConflictError, match="is active"):
        await here.remove("exact", first, who="ann")
    assert await here.remove("exact", second[:8], who="bob") == second
    assert [(line.action, line.version, line.who) for line in await here.audit("exact", 1)] == [
        ("remove", second, "bob")
    ]
    await there.copy.refresh()
    for registry, folder in ((here, "here"), (there, "there")):
        assert set((await registry.name("exact")).versions) == {first}
        with pytest.raises(NotRegisteredError, match="exact has no version"):
            await registry.resolve("exact", second)
        assert not (tmp_path / folder / "content" / f"{second}.json").exists()
    assert await redis.hlen("gspo:{@rewards}:content") == 1

    # A copy from before does not bring it back; to hand it in again does.
    await redis.flushall()
    older = Registry(redis, tmp_path / "older", replica="older")
    await keep(older, submission())
    await keep(older, submission(number=1))
    await redis.flushall()
    stale = await there.name("exact")
    assert set(stale.versions) == {first}
    removed_again = await keep(there, submission(number=1))
    assert set((await here.name("exact")).versions) == {first, removed_again}

    # The content stays while another name has it; a name without versions is none.
    await here.retire("exact", who="ann")
    for version in (first, second):
        await here.remove("exact", version, who="ann")
    assert [name.name for name in await there.names()] == ["other"]
    assert (await there.resolve("other")).version == first
    with pytest.raises(NotRegisteredError, match="there is no reward function 'exact'"):
        await there.name("exact")
    other = submission().model_copy(update={"kind": "environment"})
    await there.submit(other, content(other).model_copy(update={"kind": "environment"}), who="ann")


async def test_a_version_that_a_run_asks_for_is_not_removed(redis: Redis, tmp_path: Path) -> None:
    registry = Registry(redis, tmp_path, replica="test")
    first, _ = await keep(registry, submission()), await keep(registry, submission(number=1, activate=True))
    await registry.resolve("exact", first[:10])
    with pytest.raises(ConflictError, match="is asked for by its number"):
        await registry.remove("exact", first, who="ann")


async def test_a_submission_beyond_a_quota_is_refused_until_space_is_free(redis: Redis, tmp_path: Path) -> None:
    quotas = {"versions": 3, "versions_per_name": 2, "total_mb": 2, "name_mb": 1}
    async with open_rest_client(tmp_path, redis, quotas=quotas) as (client, _, _):

        async def submit(name: str, number: int, *tests: dict[str, object]) -> httpx.Response:
            body = {"name": name, "source": f"{SOURCE}# {number}\n", "tests": list(tests)}
            return await client.post("", json=body)

        case = {"input": {"completion": "4", "answer": "4", "filler": "x" * 600_000}, "expected": 1}
        heavy = await submit("a", 0, case)
        assert heavy.status_code == 201
        full = await submit("a", 1, case)  # the test cases count
        assert full.status_code == 409
        assert full.json()["detail"].startswith(
            "'a' has 0.6 MiB, this version has 0.6, and reward.quotas.name_mb is 1."
        )
        assert (await submit("a", 1)).status_code == 201
        assert "'a' has 2 versions, and reward.quotas.versions_per_name is 2. Remove" in (await submit("a", 2)).text
        assert (await submit("a", 1)).status_code == 201, "it is there already"
        assert (await submit("b", 0)).status_code == 201
        full = await submit("b", 1)
        assert "the registry has 3 versions, and reward.quotas.versions is 3. Remove versions" in full.json()["detail"]
        version = heavy.json()["version"]
        assert (await client.delete(f"/a/versions/{version}")).status_code == 409, "it is active"
        assert (await client.delete("/a")).status_code == 200
        assert (await client.delete(f"/a/versions/{version}")).json() == {"name": "a", "removed": version}
        assert (await submit("b", 1)).status_code == 201


async def test_an_unreadable_entry_leaves_the_others_usable(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis) as (client, scorer, registry):
        good = (await client.post("", json={"name": "good", "source": SOURCE})).json()["version"]
        bad = (await client.post("", json={"name": "bad", "source": NEWER})).json()["version"]
        document = json.loads(await redis.hget("gspo:{@rewards}:registered", "good") or "")
        ruined = json.dumps({**document, "name": "ruined", "kind": "nonsense"})
        await redis.hset("gspo:{@rewards}:registered", "ruined", ruined)
        await redis.set("gspo:{@rewards}:token", "another")
        (tmp_path / "registry/names/torn.json").write_bytes(b"\xff{")
        for text in ('{"entry": 5, "convention": ["x"]}', "x" * 100, ""):
            broken = json.dumps({"version": bad, "kind": "reward", "source": "x", "entry": 5, "signature": text})
            await _spoil(redis, registry, tmp_path / "registry", bad, broken)
            listed = {view["name"]: view for view in (await client.get("")).json()["rewards"]}
            assert (listed["good"]["active"], listed["good"]["unreadable"]) == (good, "")
            assert listed["bad"]["unreadable"].startswith(f"version {bad[:12]} cannot be read (")
            assert listed["ruined"]["unreadable"].startswith("ruined cannot be read (kind: ")
            (version,) = (await client.get("/bad/versions")).json()["versions"]
            assert (version["version"], version["unreadable"] != "") == (bad, True)
            assert (await client.get(f"/bad/versions/{bad}")).json()["unreadable"] == version["unreadable"]
            for path in ("/bad/source", "/ruined"):
                shown = await client.get(path)
                assert (shown.status_code, "cannot be read (" in shown.json()["detail"]) == (404, True)
            both = [make_rollout("4", answer="4") for _ in range(2)]
            for rollout, name in zip(both, ("good", "bad"), strict=True):
                rollout.rewards.append(RewardUse(name=name, weight=1.0))
            scored, failed = await scorer.score(both)
            assert (reward_or_failure(scored), "cannot be read" in failed.failure) == (1.0, True)
        # Another submission of its source replaces it, and it can be removed.
        assert (await client.post("", json={"name": "bad", "source": NEWER})).status_code == 201
        assert (await client.get("/bad")).json()["unreadable"] == ""
        await _spoil(redis, registry, tmp_path / "registry", bad, "{}")
        assert (await client.delete("/bad")).status_code == 200
        assert (await client.delete(f"/bad/versions/{bad}")).status_code == 200
        await registry.copy.refresh()
        assert {view["name"] for view in (await client.get("")).json()["rewards"]} == {"r", "good", "ruined"}


async def _spoil(redis: Redis, registry: Registry, folder: Path, version: str, text: str) -> None:
    """Put something else in a version's place, in Redis and on disk."""
    await redis.hset("gspo:{@rewards}:content", version, text)
    (folder / "content" / f"{version}.json").write_text(text)
    registry._contents.clear()
