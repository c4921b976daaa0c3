"""Start the service of the run's own agents: `python -m gspo.agents --run-dir DIR`."""

from gspo.common.host.packages import checked_packages

with checked_packages():
    from gspo.agents.app import run_agents
    from gspo.agents.check import check
    from gspo.common.service.app import run_process
    from gspo.common.service.options import await_start, parse_options

if __name__ == "__main__":
    options = parse_options("agents", check, meaning="Plays the run's rollouts with your agent, in sandboxes.")
    run_process(await_start(options), run_agents)
