"""Fault injection: a seeded schedule kills, stops, wipes, cuts, drops and fills, and the log is checked afterwards.

`python -m benchmarks chaos` (`make chaos`) writes docs/chaos.md. Services are real. In simulated runs engine and
training step are not, and each process has a network namespace of its own where root may make it.
"""
