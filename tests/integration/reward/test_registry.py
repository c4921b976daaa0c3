"""The registry: what replicas share, what a wiped Redis costs, and many callers at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.reward.registered import ConflictError, Content, NotRegisteredError
from services.reward.registry import Registry, RegistryCopy
from services.reward.submission import Submission
from tests.integration.reward.desk import SOURCE, open_desk

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
    one, two = await keep(here, submission()), await keep(here, submission(number=1))
    await here.activate("exact", two, who="ann")
    assert (await there.resolve("exact")).version == two
    await there.sync()  # as it does every second
    await redis.flushall()
    # The other replica, which has only ever looked.
    assert (await there.resolve("exact")).version == two
    assert (await here.name("exact")).versions.keys() == {one, two}
    await redis.flushall()
    assert (await here.name("exact")).active == two
    assert [(line.action, line.was) for line in await here.audit("exact", 10)] == [
        ("activate", one),
        ("submit", ""),
        ("submit", ""),
    ]
    anew = Registry(redis, tmp_path / "anew", replica="anew")
    assert (await anew.resolve("exact", one[:12])).source == submission().source
    assert (await RegistryCopy(tmp_path / "anew").resolve("exact")).version == two


async def test_an_older_copy_does_not_undo_a_newer_state(redis: Redis, tmp_path: Path) -> None:
    old, new = (Registry(redis, tmp_path / name, replica=name) for name in ("old", "new"))
    one = await keep(old, submission())
    two = await keep(new, submission(number=1, activate=True))
    await redis.flushall()
    await old.sync()  # knows the first version alone
    known = await old.name("exact")
    assert known.active == one
    await new.sync()
    assert (await old.name("exact")).active == two
    await old._put_back_name(known)  # it had looked before the other wrote
    assert (await old.name("exact")).active == two
    assert (await old.name("exact")).versions.keys() == {one, two}


async def test_two_redis_that_share_a_folder_agree(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    other = Redis.from_url(redis_url.replace("/0", "/1"), protocol=2)
    try:
        ours, theirs = Registry(redis, tmp_path, replica="ours"), Registry(other, tmp_path, replica="theirs")
        one = await keep(ours, submission())
        assert (await theirs.resolve("exact")).version == one
        two = await keep(theirs, submission(number=1, activate=True))
        assert (await ours.name("exact")).active == two
    finally:
        await other.aclose()


async def test_what_does_not_fit_is_refused(redis: Redis, tmp_path: Path) -> None:
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
    """Each submits one of 40 sources under one of 8 names, makes its own version active only if it saw the last state,
    and tries what is active; no update is lost and every version can be had."""
    names, sources = [f"f{number}" for number in range(8)], [f"{SOURCE}# {number}\n" for number in range(40)]
    swaps: list[tuple[str, str, str]] = []

    async with open_desk(tmp_path, redis, calls_per_minute=1_000_000) as (client, _, registry):

        async def one_caller(number: int) -> None:
            name = names[number % len(names)]
            told = await client.post("", json={"name": name, "source": sources[number % len(sources)]})
            assert told.status_code == 201, told.text
            version, active = told.json()["version"], (await client.get(f"/{name}")).json()["active"]
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
            found = await registry.name(name)
            # From the first version on, each activation that was answered began where another had ended.
            own = [(before, after) for swapped, before, after in swaps if swapped == name]
            first = next(iter(found.versions))
            ends = [first, *(after for _, after in own)]
            assert sorted([*(before for before, _ in own), found.active]) == sorted(ends)
            assert found.revision == len(found.versions) + len(own)
            for version in found.versions:
                source = (await client.get(f"/{name}/source", params={"version": version})).json()["source"]
                assert source in sources
        lines = await registry.audit(None, 10_000)
        assert sum(line.action == "submit" for line in lines) == 1000
        assert sum(line.action == "activate" for line in lines) == len(swaps)
