"""Start the reward service: `python -m gspo.reward --run-dir DIR`."""

from gspo.common.host.packages import checked_packages

with checked_packages():
    from gspo.common.service.app import run_process
    from gspo.common.service.options import await_start, parse_options
    from gspo.reward.app import run_reward
    from gspo.reward.check import check

if __name__ == "__main__":
    options = parse_options("reward", check, meaning="Scores rollouts with the run's reward functions.")
    run_process(await_start(options), run_reward)
