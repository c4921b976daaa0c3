"""The parts of a score: the reward functions of a source, and the rewards that come with the rollout itself."""

from gspo.common.config.gateway import AGENT_PART
from gspo.common.config.reward import ENVIRONMENT_PART
from gspo.common.config.sources import Source
from gspo_proto.rollout_pb2 import RewardUse

# Parts without a function: the rollout has their value in its episode.
EPISODE_PARTS = (ENVIRONMENT_PART, AGENT_PART)


def reward_uses(source: Source) -> list[RewardUse]:
    """The reward functions of a source as its rollouts name them, with those of its environment or agent."""
    uses = [
        RewardUse(
            name=function.label,
            version=function.version or "",
            weight=function.weight,
            part_weights=function.part_weights,
        )
        for function in source.functions
    ]
    if source.environment.used:
        uses.append(RewardUse(name=ENVIRONMENT_PART, weight=source.environment.weight))
    if source.agent_weight is not None:
        uses.append(RewardUse(name=AGENT_PART, weight=source.agent_weight))
    return uses
