"""The faces of the reward service: REST for people and scripts, gRPC for programs that want scores.

They decide nothing: scorer.py scores as it does for the streams, registry.py keeps, admission.py refuses. Here alone
is FastAPI.
"""
