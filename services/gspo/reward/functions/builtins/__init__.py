"""The reward functions that come with gspo: each file is read as text and loaded in the sandbox like a user's.

So none imports another module of gspo. The right answer is the column ground_truth, reward_model.ground_truth or
answer, the first one that exists. A function that cannot judge an answer raises: that is a failure, not a score of 0.
`llm_judge` and `reward_model` need the network and the GPU, and run outside the sandbox, in ../remote.py and
../classifier.py.
"""
