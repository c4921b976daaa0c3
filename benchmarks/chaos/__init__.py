"""Fault injection: a seeded schedule kills, stops, wipes, cuts and fills, and the log is checked afterwards.

`python -m benchmarks chaos` (`make chaos`) writes docs/chaos.md. The services are the real ones, each in a network
namespace of its own where root may make them; the engine and the training step are simulated.
"""
