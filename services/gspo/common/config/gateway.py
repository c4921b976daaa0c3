"""The sections `gateway` and `agent`: programs of others talk to the policy, and may play the run's rollouts."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gspo.common.config.fields import ON_RESUME, Section

AGENT_PART = "agent"


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


class AgentConfig(Section):
    """Agents that play the rollouts: any program that speaks the API of OpenAI or Anthropic."""

    external: bool = Field(
        False, description="Offer each rollout at the gateway's /v1/tasks/lease, for workers that you start"
    )
    weight: float | None = Field(
        1.0, description="Factor of the reward that the agent returns; null: reward.functions alone score the rollouts"
    )
    answer_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of one answer; null: no limit but algorithm.response_length, which bounds all tokens of "
        "a rollout behind its first context",
        json_schema_extra=ON_RESUME,
    )
    max_rollouts: PositiveInt = Field(
        64, description="Rollouts that one gateway keeps open or played at a time", json_schema_extra=ON_RESUME
    )
    lease_s: PositiveFloat = Field(
        60.0,
        description="A worker that neither calls the model nor sends a heartbeat for so long loses its rollout",
        json_schema_extra=ON_RESUME,
    )
    timeout_s: PositiveFloat = Field(
        600.0, description="Longest rollout; workers end it then", json_schema_extra=ON_RESUME
    )

    @property
    def used(self) -> bool:
        """Whether agents play the rollouts."""
        return self.external

    @model_validator(mode="after")
    def _is_used(self) -> AgentConfig:
        if not self.used:
            self.check_defaults("belongs to an agent, and there is none", "Set agent.external: true")
        return self
