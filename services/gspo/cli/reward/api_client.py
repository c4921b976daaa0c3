"""Calls of a reward service's REST door, for `gspo reward`: where it is, which token to show, what it refused.

It prints nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from gspo.cli.monitor.status import read_instances
from gspo.cli.processes.exit_codes import RunError
from gspo.cli.rundir import http_client
from gspo.cli.rundir.plan import check_run_dir, is_run_dir_locked, supervisor_facts
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.config.services import TlsConfig
from gspo.common.errors import InputError
from gspo.common.network.credentials import check_tls, shared_token

URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE = "GSPO_REWARD_URL", "GSPO_REWARD_TOKEN", "GSPO_REWARD_CA"
# A submission is loaded and tested before it is answered.
TIMEOUT_S = 180.0
# A refusal by these is about what the user gave.
_BAD_INPUT = (400, 401, 403, 404, 409, 413, 415, 422)


class RefusedCallError(InputError):
    """The service refused; `problems` has each reason."""

    def __init__(self, what: str, detail: str, problems: list[dict[str, Any]]) -> None:
        super().__init__(what, detail, "Mend it and call again")
        self.problems = problems

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.rule}"]
        lines += [one["text"] for one in self.problems if one["text"] != self.rule]
        for one in self.problems:
            lines += [
                text.rstrip() for text in (one["traceback"], one["output"] and f"it printed: {one['output']}") if text
            ]
        return printable("\n".join(lines))


def printable(text: str) -> str:
    """Text of a function, without the characters that a terminal obeys: they are shown by their numbers."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


class RewardClient:
    """One service's door.

    Args:
        url: Its address, such as http://127.0.0.1:8081.
        token: Empty where it asks for none.
        tls: Whose certificate it must show, where the address is https.
    """

    def __init__(self, url: str, token: str, tls: TlsConfig) -> None:
        self._url, self._token, self._tls = url, token, tls

    def call(self, method: str, path: str = "", **given: Any) -> Any:
        """The JSON of an answer; `path` comes behind /v1/rewards.

        Raises:
            RefusedCallError: What was given cannot work.
            RunError: The service cannot be reached, or failed.
        """
        try:
            with http_client.blocking_client(self._url, self._token, self._tls, timeout_s=TIMEOUT_S) as client:
                reply = client.request(method, f"/v1/rewards{path}", **given)
        except httpx.HTTPError as error:
            raise RunError(f"the reward service at {self._url} does not answer ({error})") from error
        if reply.is_success:
            return reply.json()
        try:
            refusal = reply.json()
        except ValueError:
            refusal = {"detail": reply.text[:500]}
        if reply.status_code in _BAD_INPUT:
            raise RefusedCallError("refused", refusal["detail"], refusal.get("problems", []))
        raise RunError(f"the reward service answered {reply.status_code}: {refusal['detail']}")


def find_reward_service(run: Path | None, url: str | None) -> RewardClient:
    """The door at `url`, else of a run's reward service: the given run, or the newest one under ./runs.

    Raises:
        InputError: There is no run, or it has no reward service now.
    """
    url = url or os.environ.get(URL_VARIABLE)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if url and run is None:
        return RewardClient(url, token, TlsConfig(ca=_authority()))
    run_dir = run or _newest(Path("runs"))
    check_run_dir(run_dir)
    config = read_config(run_dir / CONFIG_NAME)
    found = http_client.url(_address(run_dir, config), config)
    return RewardClient(found, token or shared_token(config), config.services.tls)


def _authority() -> Path | None:
    """The certificates that are believed where there is only an address."""
    given = os.environ.get(CA_VARIABLE)
    if given:
        check_tls(TlsConfig(ca=Path(given)), "")
    return Path(given) if given else None


def _newest(folder: Path) -> Path:
    """The newest run or `gspo reward serve` below a folder; one that is up before one that is not."""
    found = [path.parent for form in ("*", ".rewards/service/*") for path in folder.glob(f"{form}/{CONFIG_NAME}")]
    if not found:
        raise InputError(str(folder), "holds no run directory", "Give one with --run, or an address with --url")
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in found if is_run_dir_locked(path)), found[0])


def _address(run_dir: Path, config: Config) -> str:
    with _explained(run_dir):
        redis_url = config.services.redis_url or str(supervisor_facts(run_dir)["redis_url"])
        members = asyncio.run(read_instances(redis_url, config))
        return next(instance.http for instance in members if instance.service == "reward" and instance.grpc)


@contextmanager
def _explained(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, StopIteration, InputError) as error:
        raise InputError(
            str(run_dir),
            "has no reward service that runs",
            "Start the run, or `gspo reward serve CONFIG`; or give the address: --url http://HOST:PORT",
        ) from error
