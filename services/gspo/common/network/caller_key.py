"""The key that an HTTP caller shows: where it is read, how it is compared, and the reply to a wrong one."""

import hmac

from gspo.common.network.auth_log import note_refusal
from gspo.common.network.http_server import Scope, Send, caller_of, header, reply

WRONG_KEY = "the shared token is missing or wrong: send it as 'Authorization: Bearer TOKEN'"
_BEARER = "Bearer "


def caller_key(scope: Scope) -> str:
    """The key of a request; empty if it has none."""
    if credentials := header(scope, b"authorization"):
        return credentials.removeprefix(_BEARER) if credentials.startswith(_BEARER) else ""
    # Clients of Anthropic's API send the key alone, in a header of its own.
    return header(scope, b"x-api-key")


def is_token(key: str, token: str) -> bool:
    """Whether a key is the shared token; any key is if there is no token."""
    return not token or hmac.compare_digest(key.encode("latin-1"), token.encode())


async def refuse_key(scope: Scope, send: Send, why: str) -> None:
    """Reply 401, count and log it. Clients of OpenAI's and Anthropic's APIs show the message of `error`."""
    note_refusal("http", "token", caller=caller_of(scope), target=scope["path"], detail=why)
    await reply(send, 401, {"detail": why, "error": {"type": "authentication_error", "message": why}})
