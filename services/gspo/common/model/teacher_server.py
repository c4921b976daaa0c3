"""The teacher at an address: how it is asked, and its check before a run starts.

The reward service asks it during a run (services/gspo/reward/scoring/taught_tokens.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.files import read_added_tokens, read_tokens
from gspo.common.network.api_keys import key_header

COMPLETIONS = "/v1/completions"
_MODELS, _TOKENIZE = "/v1/models", "/tokenize"
_KEY = "teacher.address"
_START = "Start `vllm serve TEACHER`, and set teacher.address to its URL, without /v1"
_TIMEOUT_S = 60.0
_TEXT_CHARS = 300
_TOKENS_A_REQUEST = 4096
# Characters for a space and a line's end in the tokens of vocabularies of bytes, and of SentencePiece.
_SPELLED = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})


def server_header() -> dict[str, str]:
    """The header with the server's key, if it wants one."""
    return key_header("GSPO_TEACHER_API_KEY")


def scoring_body(model: str | None, token_ids: Sequence[int]) -> dict[str, Any]:
    """The request for the log-prob of each token given those before it, at temperature 1. vLLM samples at least one."""
    return {"model": model, "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}


def check_teacher_server(config: Config, policy: Path, rows: int | None) -> None:
    """Ask the server for its models, its tokenizer, and a log-prob of the policy's last row.

    Args:
        policy: The folder of the policy, whose tokens the teacher must read alike.
        rows: Rows of the policy's vocabulary, where they are known.

    Raises:
        InputError: It does not answer, serves another model, reads too few tokens, or has another tokenizer.
    """
    address = (config.teacher.address or "").rstrip("/")
    with httpx.Client(base_url=address, timeout=_TIMEOUT_S, headers=server_header()) as client:
        _check_model(config, _asked(client, "GET", _MODELS))
        _check_tokens(client, config.teacher.model, policy)
        if rows is not None:
            _check_rows(client, config.teacher.model, rows)


def _asked(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object that the server answers with."""
    where = str(client.base_url).rstrip("/") + path
    try:
        reply = client.request(method, path, json=body)
        content = reply.json() if reply.is_success else None
    except (httpx.HTTPError, ValueError) as error:
        raise InputError(_KEY, f"{where} gives no answer ({type(error).__name__}: {error})", _START) from error
    if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        fix = "Set the environment variable GSPO_TEACHER_API_KEY to the server's --api-key"
        raise InputError(_KEY, f"{where} answered HTTP {reply.status_code}: it wants a key, or another one", fix)
    if not isinstance(content, dict):
        raise InputError(_KEY, f"{where} answered HTTP {reply.status_code}: {reply.text[:_TEXT_CHARS]}", _START)
    return content


def _check_model(config: Config, listed: dict[str, Any]) -> None:
    teacher = config.teacher
    models = {model.get("id"): model for model in listed.get("data", ()) if isinstance(model, dict)}
    model = models.get(teacher.model)
    if model is None:
        raise InputError(
            "teacher.model",
            f"{teacher.address} serves {', '.join(map(repr, models)) or 'no model'}, not {teacher.model!r}",
            "Set the name that it serves, or start it with --served-model-name",
        )
    # vLLM samples a token behind the last one.
    longest, most = config.algorithm.longest_branch + 1, model.get("max_model_len")
    if isinstance(most, int) and most < longest:
        raise InputError(
            _KEY,
            f"the teacher reads at most {most} tokens, and a branch has up to prompt_length + response_length "
            f"= {longest - 1} with one behind them",
            f"Start it with --max-model-len {longest}, or lower algorithm.prompt_length or response_length",
        )


def _check_tokens(client: httpx.Client, model: str | None, policy: Path) -> None:
    """The server reads the texts of the policy's tokens with the policy's ids.

    A token may merge with its neighbours, so not every id is seen, but those of special tokens are.
    """
    ids, added = read_tokens(policy), set(read_added_tokens(policy))
    tokens = {number: token for token, number in ids.items()}
    seen: set[int] = set()
    numbers = sorted(tokens)
    for start in range(0, len(numbers), _TOKENS_A_REQUEST):
        part = numbers[start : start + _TOKENS_A_REQUEST]
        texts = [token if token in added else token.translate(_SPELLED) for token in map(tokens.__getitem__, part)]
        body = {"model": model, "prompt": "\n".join(texts), "add_special_tokens": False, "return_token_strs": True}
        read = _asked(client, "POST", _TOKENIZE, body)
        for number, theirs in zip(read["tokens"], read["token_strs"], strict=True):
            # A token that the policy has not is one more of the teacher.
            if theirs != tokens.get(number) and (number in tokens or theirs in ids):
                _refuse_tokenizer(policy, number, tokens.get(number), theirs)
            seen.add(number)
    for token in sorted(added, key=ids.__getitem__):
        if ids[token] not in seen:
            _refuse_tokenizer(policy, ids[token], token, None)


def _refuse_tokenizer(policy: Path, number: int, ours: str | None, theirs: str | None) -> None:
    names = ["nothing" if token is None else repr(token) for token in (ours, theirs)]
    raise InputError(
        _KEY,
        f"the teacher has another tokenizer than the policy ({policy}): id {number} is {names[0]} for the policy and "
        f"{names[1] if theirs else 'not read so'} for the teacher",
        "Take a teacher of the policy's family, with the same token ids",
    )


def _check_rows(client: httpx.Client, model: str | None, rows: int) -> None:
    """The policy may sample its highest row, which need not be a token."""
    try:
        _asked(client, "POST", COMPLETIONS, scoring_body(model, [rows - 1, rows - 1]))
    except InputError as error:
        raise InputError(
            _KEY,
            f"the teacher gave no log-prob of token {rows - 1}, which the policy may sample. {error.rule}",
            f"Take a teacher with a vocabulary of {rows} rows or more",
        ) from error
