"""Start the coordinator: `python -m services.coordinator --run-dir DIR`."""

from __future__ import annotations

from services.common.importing import importing
from services.common.runtime import await_start, parse_options, run_service
from services.coordinator.check import check

MEANING = "Decides what is generated and when, measures the policy, and shows the run."


def main() -> None:
    """Check, or serve until the run ends."""
    options = parse_options("coordinator", check, meaning=MEANING, checks_in_life=True)
    with importing():
        from services.coordinator.life import live  # after the options: a check needs no door

    run_service(await_start(options), live)


if __name__ == "__main__":
    main()
