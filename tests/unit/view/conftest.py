"""Rollouts for a step log, and a configuration that reads well."""

from tests.unit.cli.conftest import config, raw_config
from tests.unit.learner.conftest import scored

__all__ = ["config", "raw_config", "scored"]
