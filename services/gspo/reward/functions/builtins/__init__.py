"""The reward functions that come with gspo: each file is read as text and loaded in the sandbox like a user's.

So none imports anything of ours, and each stands alone. The right answer is the column ground_truth, else
reward_model.ground_truth, else answer. A function that cannot judge raises: that is a failure, and never a 0.
`llm_judge` and `reward_model` need what the sandbox keeps out, and are services/gspo/reward/functions/judge.py and
services/gspo/reward/functions/classifier.py.
"""
