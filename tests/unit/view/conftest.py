"""Rollouts for a step log."""

from tests.unit.learner.conftest import scored

__all__ = ["scored"]
