"""Start the coordinator: `python -m gspo.coordinator --run-dir DIR`."""

import sys
from functools import partial

from gspo.common.host.packages import checked_packages

with checked_packages():
    from gspo.common.host.process_tuning import importing
    from gspo.common.service.options import await_start, parse_options
    from gspo.coordinator.check import check

MEANING = "Issues groups, measures the policy, and shows the run."


def main() -> None:
    """Check, or serve until the run ends."""
    own_check = partial(check, is_evaluation="--evaluate" in sys.argv)
    options = parse_options("coordinator", own_check, meaning=MEANING, checks_at_startup=True)
    with importing():
        # After the options: a check needs no server.
        from gspo.common.service.app import run_process
        from gspo.coordinator.app import run_coordinator

    run_process(await_start(options), run_coordinator)


if __name__ == "__main__":
    main()
