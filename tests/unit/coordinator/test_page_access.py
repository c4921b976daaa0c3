"""The way into the run's page: links that work once, cookies of one process, and callers that get neither."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from gspo.common.network.http_server import HttpGuard, Receive, Scope, Send, reply
from gspo.coordinator.page.page_access import COOKIE_S, ENTRY_PATH, LINK_PATH, LINK_S, MAX_LINKS, PageAccess, Secrets

TOKEN = "a-secret-of-tests"
BEARER = {"authorization": f"Bearer {TOKEN}"}


class LinkClock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def api(_scope: Scope, _receive: Receive, send: Send) -> None:
    await reply(send, 200, {"answer": "api"})


async def page(_scope: Scope, _receive: Receive, send: Send) -> None:
    await reply(send, 200, {"answer": "page"})


@pytest.fixture
def clock() -> LinkClock:
    return LinkClock()


def client_of(token: str, clock: LinkClock, *, is_tls: bool = False) -> TestClient:
    access = PageAccess(api, page, token, is_tls=is_tls, clock=clock)
    return TestClient(HttpGuard(access), base_url=f"http{'s' if is_tls else ''}://127.0.0.1:8080")


@pytest.fixture
def client(clock: LinkClock) -> TestClient:
    return client_of(TOKEN, clock)


def link_of(client: TestClient) -> str:
    answer = client.post(LINK_PATH, json={}, headers=BEARER)
    assert answer.status_code == 201
    return str(answer.json()["path"])


def test_a_link_works_once_and_leaves_a_strict_cookie(client: TestClient) -> None:
    assert client.get("/rollouts").status_code == 401
    link = link_of(client)
    answer = client.get(link)
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie and "Secure" not in cookie
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["refresh"] == "0; url=/", "a strict cookie is not sent after a redirect from elsewhere"
    assert client.get("/rollouts").json() == {"answer": "page"}
    client.cookies.clear()
    again = client.get(link)
    assert again.status_code == 401
    assert "used, or has expired" in again.text
    assert "set-cookie" not in again.headers


def test_links_and_cookies_expire(client: TestClient, clock: LinkClock) -> None:
    link = link_of(client)
    clock.now += LINK_S + 1
    assert client.get(link).status_code == 401
    client.get(link_of(client))
    assert client.get("/").status_code == 200
    clock.now += COOKIE_S + 1
    assert client.get("/").status_code == 401


def test_a_cookie_is_of_one_process_and_lets_nobody_call_the_api(client: TestClient, clock: LinkClock) -> None:
    client.get(link_of(client))
    assert client.get("/v1/state").status_code == 401
    assert client.post("/v1/stop", json={"reason": "x"}).status_code == 401
    assert client.post(LINK_PATH, json={}).status_code == 401
    assert client.get("/docs").status_code == 401
    assert client.get("/v1/state", headers=BEARER).json() == {"answer": "api"}
    other = client_of(TOKEN, clock)
    other.cookies.update(client.cookies)
    assert other.get("/").status_code == 401, "a restart forgets all readers"


@pytest.mark.parametrize("cookie", ["", "gspo-page-0=x", "a=b; ;;;=", "gspo-page-0=\x00", "x" * 5000])
def test_foreign_cookies_let_nobody_in(client: TestClient, cookie: str) -> None:
    assert client.get("/", headers={"cookie": cookie}).status_code == 401


@pytest.mark.parametrize("query", ["", "?key=", "?key=wrong", "?key=a&key=b", "?" + "&".join(["a=1"] * 3)])
def test_wrong_links_let_nobody_in(client: TestClient, query: str) -> None:
    answer = client.get(f"{ENTRY_PATH}{query}")
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_a_preview_does_not_use_a_link_up(client: TestClient) -> None:
    link = link_of(client)
    assert client.head(link).status_code == 405
    assert client.get(link, headers={"sec-purpose": "prefetch"}).status_code == 405
    assert client.get(link).status_code == 200


def test_other_sites_and_hosts_are_refused_with_a_cookie_too(client: TestClient) -> None:
    client.get(link_of(client))
    assert client.get("/", headers={"host": "attacker.example"}).status_code == 421
    assert client.post("/api/view", json={}, headers={"origin": "http://attacker.example"}).status_code == 403
    assert client.post("/api/view", json={}, headers={"sec-fetch-site": "same-site"}).status_code == 403
    assert client.post("/api/view", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.post("/api/view", json={}, headers={"origin": "http://127.0.0.1:8080"}).status_code == 200


def test_the_token_opens_everything_and_no_token_needs_none(client: TestClient, clock: LinkClock) -> None:
    assert client.get("/rollouts", headers=BEARER).json() == {"answer": "page"}
    assert client.get("/rollouts", headers={"authorization": "Bearer wrong"}).status_code == 401
    without = client_of("", clock)
    assert without.get("/rollouts").json() == {"answer": "page"}
    assert without.post(LINK_PATH, json={}).json() == {"path": "/", "expires_s": None}


def test_with_tls_the_cookie_is_secure(clock: LinkClock) -> None:
    client = client_of(TOKEN, clock, is_tls=True)
    cookie = client.get(link_of(client)).headers["set-cookie"]
    assert cookie.startswith("__Host-gspo-page-")
    assert cookie.endswith("; Secure")
    assert client.get("/").status_code == 200


def test_no_secret_is_kept_or_logged(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    link = link_of(client)
    client.get(link)
    client.cookies.clear()
    client.get(link)
    printed = capsys.readouterr()
    assert link.partition("=")[2] not in printed.out + printed.err
    secrets = Secrets(10.0, MAX_LINKS, LinkClock())
    assert secrets.make() not in repr(vars(secrets))


def test_the_oldest_secret_goes_when_there_are_too_many() -> None:
    secrets = Secrets(10.0, 2, LinkClock())
    first, second, third = (secrets.make() for _ in range(3))
    assert [secrets.has(value) for value in (first, second, third)] == [False, True, True]
    assert [secrets.take(third), secrets.take(third)] == [True, False]
