"""The section `gateway`: the endpoint by which programs of others talk to the policy while it trains."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from gspo.common.config.fields import Section


class GatewayConfig(Section):
    """An endpoint that speaks the APIs of OpenAI and Anthropic."""

    may_change = True

    replicas: NonNegativeInt = Field(
        0, le=64, description="Gateways that `gspo run` starts; services.gateway_port is that of the first"
    )
    model_name: str = Field("policy", min_length=1, description="Name by which clients ask for the policy")
    tool_parser: str | None = Field(
        None, description="vLLM's name of the parser that reads tool calls, such as hermes; null: calls stay text"
    )
    reasoning_parser: str | None = Field(
        None, description="vLLM's name of the parser that separates thoughts, such as qwen3; null: they stay text"
    )
    request_timeout_s: PositiveFloat = Field(
        600.0, description="Longest time of one answer, with weight updates and the loss of a generator within"
    )

    @model_validator(mode="after")
    def _runs(self) -> GatewayConfig:
        if not self.replicas:
            self.check_defaults("has no effect with gateway.replicas 0", "Leave it out, or set gateway.replicas: 1")
        return self
