"""The HTTP API of the gateway: vLLM's own routes for the APIs of OpenAI and Anthropic, on the policy of the run."""

from argparse import Namespace
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from fastapi import Depends, FastAPI, Request
from starlette.datastructures import State
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic import api_router as messages
from vllm.entrypoints.cli.launch import make_arg_parser  # its own module moves between versions
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completions
from vllm.entrypoints.openai.models import api_router as models
from vllm.entrypoints.openai.responses import api_router as responses
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gspo.common.config.engines import LEAST_TEMPERATURE
from gspo.common.config.schema import Config
from gspo.common.network.http_server import ASGIApp, BoundedBodies, Message, Receive, Scope, Send
from gspo.common.service.app import Service
from gspo.gateway.constraints import constraint, media_part, wants_calls
from gspo.gateway.generators import Generators
from gspo.gateway.policy_client import PolicyClient
from gspo.gateway.sessions.recorder import Recorder
from gspo.gateway.sessions.session_store import Session, SessionStore
from gspo.gateway.sessions.task_api import CallerKeys, task_routes
from gspo.gateway.whole_parser import whole_parser

# A conversation of a million tokens, as text.
_MAX_BODY_BYTES = 16 * 2**20
_ANSWERED_WITH_CALLS = ("/v1/chat/completions", "/v1/messages")
VERSION_HEADER = b"x-gspo-version"


async def chat_api(service: Service, folder: Path, generators: Generators, store: SessionStore) -> ASGIApp:
    """The app of /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/models; also of /v1/tasks.

    Args:
        folder: The model's, for its tokenizer and chat template.
        store: That of the rollouts that agents play.
    """
    config = service.config
    arguments = _arguments(config, folder)
    client = PolicyClient(_vllm_config(config, folder), generators, config.gateway.request_timeout_s)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, dependencies=[Depends(_admit)])
    await init_app_state(cast("EngineClient", client), app.state, arguments, ("generate",))
    for api in (chat, completions, responses, messages, models):
        api.attach_router(app)
    if config.agent.used:
        app.include_router(task_routes(service, store))
    init_exception_handler(app)
    tokenizer, parser = client.renderer.get_tokenizer(), app.state.online_renderer.parser

    def recorder(session: Session) -> Recorder:
        whole = whole_parser(parser, session.variables) if parser else None
        return Recorder(session, store, config, tokenizer, whole)

    bounded = BoundedBodies(cast("ASGIApp", app), _MAX_BODY_BYTES)
    return CallerKeys(_WithVersion(bounded), service.options.token, store, recorder)


def _arguments(config: Config, folder: Path) -> Namespace:
    """The arguments of `vllm serve` that its serving classes read."""
    gateway = config.gateway
    line = ["--model", str(folder), "--served-model-name", gateway.model_name]
    if gateway.tool_parser is not None:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", gateway.tool_parser]
    arguments = cast("Namespace", make_arg_parser(FlexibleArgumentParser()).parse_args(line))
    # Where the classes look for it; vLLM's server copies its own option there.
    arguments.structured_outputs_config.reasoning_parser = gateway.reasoning_parser or ""
    return arguments


def _vllm_config(config: Config, folder: Path) -> VllmConfig:
    """vLLM's configuration of the model, without one of an engine."""
    arguments = AsyncEngineArgs(
        model=str(folder),
        max_model_len=config.algorithm.longest_branch,
        trust_remote_code=config.model.trust_remote_code,
        reasoning_parser=config.gateway.reasoning_parser or "",
        # Sampling parameters of the model's folder do not replace a client's defaults.
        generation_config="vllm",
    )
    return VllmConfig(
        model_config=arguments.create_model_config(),
        structured_outputs_config=arguments.create_structured_outputs_config(),
    )


async def _admit(request: Request) -> None:
    """Give a request vLLM's serving classes of its own, which know who asks.

    Raises:
        VLLMValidationError: As `_refuse_unsupported`.
    """
    recorder = getattr(request.state, "recorder", None)
    request.scope["app"] = SimpleNamespace(state=_of_request(request.app.state, recorder, request.state.versions))
    await _refuse_unsupported(request, recorder)


def _of_request(state: State, recorder: Recorder | None, versions: set[int]) -> State:
    """The state of vLLM's app with copies of all that samples, renders or reads an answer."""
    client: PolicyClient = state.engine_client.of_request(recorder, versions)
    online_renderer, parser = copy(state.online_renderer), state.online_renderer.parser
    if parser is not None:
        parser = recorder.parser if recorder else whole_parser(parser, {})
    online_renderer.renderer, online_renderer.parser = client.renderer, parser
    own = State({**state._state, "engine_client": client, "online_renderer": online_renderer})
    for name, part in state._state.items():
        if hasattr(part, "online_renderer") and hasattr(part, "engine_client"):
            serving = copy(part)
            serving.engine_client, serving.online_renderer = client, online_renderer
            serving.renderer, serving.input_processor = client.renderer, client.input_processor
            serving.parser = serving.parser_cls = parser
            setattr(own, name, serving)
    return own


async def _refuse_unsupported(request: Request, recorder: Recorder | None) -> None:
    """Refuse what would constrain or change the policy's distribution, in the words of the client's API.

    Raises:
        VLLMValidationError: Names the key of the request.
    """
    if request.method != "POST":
        return
    try:
        body = await request.json()
    except (ValueError, RecursionError):  # vLLM's route says why
        return
    if not isinstance(body, dict):
        return
    if key := constraint(body):
        rule = f"{key} constrains the answer, and here the policy's own distribution is sampled. Leave it out"
        raise VLLMValidationError(rule, parameter=key)
    key, kind = media_part(body)
    if kind:
        rule = f"a message has a part that is not text: {kind}, and the policy reads text alone. Leave it out"
        raise VLLMValidationError(rule, parameter=key)
    online = request.app.state.online_renderer
    reads_calls = online.enable_auto_tools or online.use_harmony
    if request.url.path in _ANSWERED_WITH_CALLS and wants_calls(body) and not reads_calls:
        rule = (
            "tools are described to the policy, but the run has no gateway.tool_parser to read its calls. Set that key "
            "to the form of the model's calls, such as hermes, or send tool_choice none"
        )
        raise VLLMValidationError(rule, parameter="tools")
    temperature = body.get("temperature")
    if recorder is not None:
        recorder.has_calls = body.get("tool_choice") not in ("none", {"type": "none"})
        if recorder.config.agent.sampling == "run":  # whose temperature is used in any case
            return
    if isinstance(temperature, int | float) and 0 < temperature < LEAST_TEMPERATURE:
        rule = f"temperature {temperature:g} is below {LEAST_TEMPERATURE}, the least above 0. Set 0 for greedy answers"
        raise VLLMValidationError(rule, parameter="temperature")


class _WithVersion:
    """Names the versions that sampled an answer in a header; a streamed one begins before they are known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        versions: set[int] = set()
        scope.setdefault("state", {})["versions"] = versions

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start" and versions:
                span = "-".join(str(version) for version in sorted({min(versions), max(versions)}))
                message = {**message, "headers": [*message["headers"], (VERSION_HEADER, span.encode())]}
            await send(message)

        await self._app(scope, receive, send_with_version)
