"""Start the learner: `python -m services.learner --run-dir DIR [--resume]`."""

from __future__ import annotations

from services.common.cpu_threads import wait_shortly
from services.common.runtime import parse_options, run_service
from services.learner.check import check

MEANING = "Trains the policy on scored rollouts with DeepSpeed, and pushes every version to the generators."


def main() -> None:
    """Check, or train until the run ends."""
    wait_shortly()
    options = parse_options("learner", check, meaning=MEANING)
    from services.learner.life import live  # after the options: importing torch and DeepSpeed takes seconds

    run_service(options, live)


if __name__ == "__main__":
    main()
