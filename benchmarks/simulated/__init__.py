"""A run whose engine and training step only take time; coordinator, Redis, streams, reward, log and push are real.

`python -m benchmarks.simulated.run CONFIG` is `gspo run` with these two; settings.py says what they take.
"""
