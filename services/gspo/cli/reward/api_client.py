"""A client of the HTTP API of a reward service, for `gspo reward`: its address, its token, its refusals."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx

from gspo.cli.processes.exit_codes import RunError
from gspo.cli.rundir.open_run import OpenRun, api_access, api_url, open_run, read_instances
from gspo.common.config.schema import TlsConfig
from gspo.common.errors import InputError, printable
from gspo.common.network.credentials import check_tls, shared_token
from gspo.common.streams.keys import REWARD

URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE = "GSPO_REWARD_URL", "GSPO_REWARD_TOKEN", "GSPO_REWARD_CA"
# A submission is loaded and tested before it is answered.
TIMEOUT_S = 180.0
# Status codes of a refusal of the user's input.
_BAD_INPUT = (400, 401, 403, 404, 409, 413, 415, 422)


class RefusedCallError(InputError):
    """The service refused; `problems` has each reason."""

    def __init__(self, detail: str, problems: list[dict[str, Any]]) -> None:
        super().__init__("refused", detail, "Fix it and call again")
        self.problems = problems

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.rule}"]
        lines += [problem["text"] for problem in self.problems if problem["text"] != self.rule]
        for problem in self.problems:
            output = problem["output"] and f"it printed: {problem['output']}"
            lines += [text.rstrip() for text in (problem["traceback"], output) if text]
        return printable("\n".join(lines))


class RewardClient:
    """A client of one service.

    Args:
        url: Its address, such as http://127.0.0.1:8081.
        token: Empty if it requires none.
        tls: The certificates to trust, for an https address.
    """

    def __init__(self, url: str, token: str, tls: TlsConfig) -> None:
        self._url, self._token, self._tls = url, token, tls

    def call(self, method: str, path: str = "", **options: Any) -> Any:
        """The JSON of a reply; `path` is appended to /v1/rewards, `options` go to httpx.

        Raises:
            RefusedCallError: The service refuses the input.
            RunError: The service cannot be reached, or failed.
        """
        try:
            with httpx.Client(base_url=self._url, timeout=TIMEOUT_S, **api_access(self._tls, self._token)) as client:
                reply = client.request(method, f"/v1/rewards{path}", **options)
        except httpx.HTTPError as error:
            raise RunError(f"the reward service at {self._url} does not answer ({error})") from error
        if reply.is_success:
            return reply.json()
        try:
            refusal = reply.json()
        except ValueError:
            refusal = {"detail": reply.text[:500]}
        if reply.status_code in _BAD_INPUT:
            raise RefusedCallError(refusal["detail"], refusal.get("problems", []))
        raise RunError(f"the reward service answered {reply.status_code}: {refusal['detail']}")


def find_reward_service(run: Path | None, url: str | None) -> RewardClient:
    """A client of the HTTP API at `url`, or of the reward service of a run: the named one, or the newest under ./runs.

    Raises:
        InputError: There is no run, or it has no reward service now.
    """
    url = url or os.environ.get(URL_VARIABLE)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if url and run is None:
        authority = os.environ.get(CA_VARIABLE)
        tls = TlsConfig(ca=Path(authority) if authority else None)
        check_tls(tls, "")
        return RewardClient(url, token, tls)
    opened = open_run(run, ("*", ".rewards/service/*"), "Give one with --run, or an address with --url")
    config = opened.config
    return RewardClient(api_url(_address(opened), config), token or shared_token(config), config.services.tls)


def _address(run: OpenRun) -> str:
    problem: InputError | None = None
    try:
        for instance in asyncio.run(read_instances(run.redis_url, run.config)) if run.redis_url else []:
            if instance.service == REWARD and instance.grpc:
                return instance.http
    except InputError as error:
        problem = error
    raise InputError(
        str(run.run_dir),
        "has no reward service that runs",
        "Start the run, or `gspo reward serve CONFIG`; or give the address: --url http://HOST:PORT",
    ) from problem
