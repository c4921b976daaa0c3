"""Who was refused here, and who refuses us: each said in one line, counted, and never in a silent loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Literal, Protocol

import structlog

from gspo.common.telemetry import metrics

# A caller that tries again and again is said once in so long; so many callers are remembered.
_QUIET_S, _REMEMBERED = 60.0, 1000
_said: OrderedDict[tuple[str, str, str], float] = OrderedDict()
log = structlog.get_logger()

Door = Literal["grpc", "http"]


class HasReadiness(Protocol):
    """A service, as far as it is needed here."""

    problems: dict[str, str]


def note_refusal(door: Door, reason: str, *, caller: str, asked: str, detail: str) -> None:
    """Count a call that was refused, and say it unless the same caller was refused for the same a moment ago.

    Args:
        reason: Bounded name of the cause.
        caller: Address; its port does not tell callers apart.
    """
    metrics.CALLS_REFUSED.labels(door, reason).inc()
    key, now = (door, reason, _without_port(caller)), time.monotonic()
    if now - _said.get(key, -_QUIET_S) < _QUIET_S:
        return
    _said[key] = now
    _said.move_to_end(key)
    if len(_said) > _REMEMBERED:
        _said.popitem(last=False)
    log.warning("call_refused", door=door, caller=caller, asked=asked, reason=detail)


def token_rejected_by(service: HasReadiness, peer: str, *, key: str = "services.token_file") -> None:
    """Another service does not take our token: one error line, and not ready until it does."""
    cause = f"token for {peer}"
    if cause not in service.problems:
        reason = f"{peer} refuses our token: the secrets in {key} of both differ"
        service.problems[cause] = reason
        log.error("token_refused", peer=peer, reason=reason)


def token_accepted_by(service: HasReadiness, peer: str) -> None:
    """Another service takes our token, or is gone."""
    if service.problems.pop(f"token for {peer}", None):
        log.info("token_accepted", peer=peer)


def _without_port(address: str) -> str:
    """ipv4:10.0.0.1:4711 -> ipv4:10.0.0.1."""
    return address.rpartition(":")[0]
