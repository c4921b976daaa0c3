"""Agents that play the rollouts of a run.

worker.py and player/ import nothing of ours, so that workers run on any machine. The others are the service that
`gspo run` starts for agents of its own (`agent.path`, `agent.command`): it plays in sandboxes.
"""
