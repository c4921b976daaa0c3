"""Who calls the REST API: tokens of people with their roles, and how many calls each may make.

It answers nothing.

A line of the tokens file is `NAME ROLE TOKEN`; a line that starts with # is passed over. It is read again when it
changes, so that a token can be given or taken while a run is up.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from gspo.common.errors import InputError

Role = Literal["read", "submit"]
MIN_TOKEN_CHARS = 16
# Callers whose calls are counted; of more, those that were silent for longest are counted anew.
_REMEMBERED = 10_000
_FIX = "Write lines of NAME, ROLE (submit or read) and TOKEN"
log = structlog.get_logger()


@dataclass(frozen=True)
class Caller:
    """Who calls; `submit` may do what `read` may, and change things."""

    name: str
    role: Role


ANONYMOUS = Caller("anonymous", "submit")


class Callers:
    """Finds the caller by token.

    Args:
        service_token: The token that the services share; whoever has it may submit. Empty where there is none.
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

    @property
    def open_to_all(self) -> bool:
        """Whether there are no tokens: only so on loopback, which the start of a service checks."""
        return not self._service and self._file is None

    def find(self, token: str) -> Caller | None:
        """Whose token this is; None for nobody's. Looked up by digest, so that timing tells nothing."""
        if self.open_to_all:
            return ANONYMOUS
        self._refresh()
        digest = _digest(token)
        return self._service.get(digest) or self._people.get(digest)

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            changed_ns = self._file.stat().st_mtime_ns
            if changed_ns != self._read_ns:
                self._people, self._read_ns = read_tokens(self._file), changed_ns
        except (InputError, OSError) as error:
            log.warning("tokens_unreadable", reason=str(error), detail="the tokens known before stay valid")


def read_tokens(path: Path) -> dict[str, Caller]:
    """Digest of each token -> whose it is.

    Raises:
        InputError: The file cannot be read, or a line of it; no token is shown.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("reward.tokens", f"{path} cannot be read ({error})", _FIX) from error
    found: dict[str, Caller] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            digest, caller = _read_line(line, f"{path}, line {number}")
            if digest in found:
                raise InputError("reward.tokens", f"{path}, line {number}: a token is there twice", _FIX)
            found[digest] = caller
    return found


def _read_line(line: str, where: str) -> tuple[str, Caller]:
    words = line.split()
    if len(words) != 3:
        raise InputError("reward.tokens", f"{where}: has {len(words)} words", _FIX)
    name, role, token = words
    if role not in ("read", "submit"):
        raise InputError("reward.tokens", f"{where}: '{role}' is no role", _FIX)
    if len(token) < MIN_TOKEN_CHARS:
        fix = "Make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        raise InputError("reward.tokens", f"{where}: a token has at least {MIN_TOKEN_CHARS} characters", fix)
    return _digest(token), Caller(name, "submit" if role == "submit" else "read")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class RateLimit:
    """So many calls of each kind a minute for each caller, all at once if it likes: a bucket that fills steadily."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._left: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str, kind: str, cost: float = 1.0) -> float:
        """Count one call: 0 where it may go on, else the seconds until it might.

        Args:
            cost: How many calls it counts as.
        """
        now, full = time.monotonic(), float(self._per_minute)
        cost = min(cost, full)
        left, since = self._left.pop((caller, kind), (full, now))
        left = min(full, left + (now - since) * full / 60)
        self._left[caller, kind] = (left if left < cost else left - cost, now)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
        return 0.0 if left >= cost else (cost - left) * 60 / full
