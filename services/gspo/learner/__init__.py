"""The learner: trains the policy on scored rollouts and pushes every version. loop.py is the place to begin."""
