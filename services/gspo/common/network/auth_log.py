"""The log of refusals: calls that this service refuses, and services that refuse our token. Each is counted."""

import time
from collections import OrderedDict
from typing import Literal, Protocol

import structlog

from gspo.common.telemetry import metrics

# A caller that is refused again and again is logged once in this time; so many callers are remembered.
_QUIET_S, _REMEMBERED = 60.0, 1000
_logged_at: OrderedDict[tuple[str, str, str], float] = OrderedDict()
log = structlog.get_logger()

CallProtocol = Literal["grpc", "http"]


class HasReadiness(Protocol):
    """A service with its reasons not to be ready."""

    problems: dict[str, str]


def note_refusal(protocol: CallProtocol, reason: str, *, caller: str, target: str, detail: str) -> None:
    """Count a refused call, and log it unless the same caller was refused for the same reason a moment ago.

    Args:
        reason: Name of the cause, of a bounded set.
        caller: Address with its port, which does not distinguish callers.
        target: The path or method that was called.
        detail: The cause for a reader.
    """
    metrics.CALLS_REFUSED.labels(protocol, reason).inc()
    key, now = (protocol, reason, caller.rpartition(":")[0]), time.monotonic()
    if now - _logged_at.get(key, -_QUIET_S) < _QUIET_S:
        return
    _logged_at[key] = now
    _logged_at.move_to_end(key)
    if len(_logged_at) > _REMEMBERED:
        _logged_at.popitem(last=False)
    log.warning("call_refused", protocol=protocol, caller=caller, target=target, reason=detail)


def token_rejected_by(service: HasReadiness, peer: str) -> None:
    """Another service refuses our token: log one error, and be not ready until it accepts the token."""
    cause = f"token for {peer}"
    if cause not in service.problems:
        reason = f"{peer} refuses our token: the secrets in services.token_file of both differ"
        service.problems[cause] = reason
        log.error("token_refused", peer=peer, reason=reason)


def token_accepted_by(service: HasReadiness, peer: str) -> None:
    """Another service accepts our token, or has ended."""
    if service.problems.pop(f"token for {peer}", None):
        log.info("token_accepted", peer=peer)
