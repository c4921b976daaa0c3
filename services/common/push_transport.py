"""What `learner.push_transport` asks of a machine, and what it takes away: looked at before anything starts.

It opens nothing: direct.py does. Neighbours: the checks of learner and generation service, trust.py.
"""

from __future__ import annotations

import structlog

from services.common.config import Config
from services.common.errors import InputError
from services.common.machine import visible_gpus

log = structlog.get_logger()


def check_push_transport(config: Config, service: str) -> None:
    """Refuse NCCL where a service sees no GPU.

    Args:
        service: "learner" or "generation", whose machine this is.

    Raises:
        InputError: Names the key.
    """
    if config.learner.push_transport == "nccl" and not visible_gpus():
        raise InputError(
            "learner.push_transport",
            f"nccl needs a GPU of its own for the {service} service, and none can be seen here (nvidia-smi)",
            "Set it to grpc or gloo, or give the service a GPU",
        )


def warn_of_open_road(config: Config) -> None:
    """Say so where calls are encrypted and the weights beside them are not: that is for a network of the user's own."""
    if config.services.tls.is_on and config.learner.push_transport != "grpc":
        log.warning(
            "weights_in_plain_text",
            push_transport=config.learner.push_transport,
            detail="services.tls encrypts calls, and weights go beside them: whoever can listen on this network reads "
            "them; learner.push_transport: grpc encrypts them too",
        )
