"""Callers of the REST API: people's tokens with their roles, and the rate of each caller's calls.

A line of the tokens file is `NAME ROLE TOKEN`; a line that starts with # is skipped. The file is read again when it
changes, so that tokens can be added and removed during a run.
"""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import structlog

from gspo.common.errors import InputError

Role = Literal["read", "submit"]
MIN_TOKEN_CHARS = 16
# Callers whose calls are counted; beyond that, the longest silent ones are forgotten and start anew.
_REMEMBERED = 10_000
_FIX = "Write lines of NAME, ROLE (submit or read) and TOKEN"
log = structlog.get_logger()


@dataclass(frozen=True)
class Caller:
    """A caller; the role `submit` includes `read`, and may change things."""

    name: str
    role: Role


ANONYMOUS = Caller("anonymous", "submit")


class Callers:
    """Finds the caller by token.

    Args:
        service_token: The token that the services share, of the role `submit`; empty for none.
        tokens: The file of people's tokens.

    Raises:
        InputError: The file cannot be used; names the line.
    """

    def __init__(self, service_token: str, tokens: Path | None) -> None:
        self._file = tokens
        self._service = {_digest(service_token): Caller("service", "submit")} if service_token else {}
        self._people: dict[str, Caller] = {}
        self._read_ns = 0
        if tokens is not None:
            self._people, self._read_ns = read_tokens(tokens), tokens.stat().st_mtime_ns

    def find(self, token: str) -> Caller | None:
        """The caller with a token; None for an unknown one. Looked up by digest, so that timing reveals nothing.

        Without tokens all callers are ANONYMOUS: only so on loopback, which the start of a service checks.
        """
        if not self._service and self._file is None:
            return ANONYMOUS
        try:
            if self._file is not None and (changed_ns := self._file.stat().st_mtime_ns) != self._read_ns:
                self._people, self._read_ns = read_tokens(self._file), changed_ns
        except (InputError, OSError) as error:
            log.warning("tokens_unreadable", reason=str(error), detail="the tokens known before stay valid")
        digest = _digest(token)
        return self._service.get(digest) or self._people.get(digest)


def read_tokens(path: Path) -> dict[str, Caller]:
    """Digest of each token -> its caller.

    Raises:
        InputError: The file cannot be read, or a line of it; no token is shown.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("reward.tokens", f"{path} cannot be read ({error})", _FIX) from error
    callers: dict[str, Caller] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        problem, fix, digest = "", _FIX, _digest(words[-1])
        if len(words) != 3:
            problem = f"has {len(words)} words"
        elif words[1] not in get_args(Role):
            problem = f"the role '{words[1]}' is unknown"
        elif len(words[2]) < MIN_TOKEN_CHARS:
            problem = f"a token has at least {MIN_TOKEN_CHARS} characters"
            fix = "Make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        elif digest in callers:
            problem = "a token is there twice"
        if problem:
            raise InputError("reward.tokens", f"{path}, line {number}: {problem}", fix)
        callers[digest] = Caller(words[0], "submit" if words[1] == "submit" else "read")
    return callers


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class RateLimit:
    """At most `per_minute` calls of each kind by each caller, also all at once: a bucket that fills steadily."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._budgets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str, kind: str, cost: float = 1.0) -> float:
        """Count one call: 0 if it is admitted, else the seconds until it might be.

        Args:
            cost: The number of calls that it counts as.
        """
        now, full = time.monotonic(), float(self._per_minute)
        cost = min(cost, full)
        budget, since = self._budgets.pop((caller, kind), (full, now))
        budget = min(full, budget + (now - since) * full / 60)
        self._budgets[caller, kind] = (budget if budget < cost else budget - cost, now)
        if len(self._budgets) > _REMEMBERED:
            self._budgets.popitem(last=False)
        return 0.0 if budget >= cost else (cost - budget) * 60 / full
