"""Start the learner: `python -m gspo.learner --run-dir DIR [--resume]`.

With learner.ranks above 1 it starts as many of itself through torchrun; on a cluster, each host starts its share.
"""

import sys

import structlog

from gspo.common.host.packages import checked_packages

with checked_packages():
    from gspo.common.errors import EXIT_BAD_INPUT, InputError, exit_bad_input
    from gspo.common.host.process_tuning import importing, keep_freed_memory, wait_shortly
    from gspo.common.service.options import await_start, parse_options, stay
    from gspo.learner.check import check
    from gspo.learner.ranks.launcher import end_with_launcher, is_launched, own_rank

MEANING = "Trains the policy on scored rollouts with DeepSpeed, and pushes every version to the generators."


def main() -> None:
    """Check, or train until the run ends."""
    wait_shortly()
    keep_freed_memory()
    options = parse_options("learner", check, meaning=MEANING)
    if is_launched():
        end_with_launcher()
        structlog.contextvars.bind_contextvars(rank=own_rank())
        # On several hosts, the check before the start was on one.
        try:
            check(options.config)
        except InputError as error:
            exit_bad_input(error)
    elif options.config.learner.ranks > 1:
        from gspo.learner.ranks.launcher import launch

        options = await_start(options)
        # The other ranks would wait for a rank that stays.
        code = launch(options.config, [word for word in sys.argv[1:] if word != "--stay"])
        if code == EXIT_BAD_INPUT and options.stay:
            refusal = InputError("learner.ranks", "a rank had bad input", "Its line in this log has the reason")
            stay(refusal, options.host, options.http_port)
        sys.exit(code)
    # After the options: importing torch and DeepSpeed takes seconds.
    with importing():
        from gspo.common.service.app import run_process
        from gspo.learner.app import run_follower, run_learner
        from gspo.learner.ranks.process_group import left_at_end
        from gspo.learner.training.rank_control import RankZero, follow_rank_zero

    options = await_start(options)
    with left_at_end():
        if own_rank():
            run_process(options, lambda service: run_follower(service, follow_rank_zero))
        run_process(options, lambda service: run_learner(service, RankZero))


if __name__ == "__main__":
    main()
