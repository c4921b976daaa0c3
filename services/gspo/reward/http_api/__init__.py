"""The HTTP API of the reward service: functions, their versions and trials. Only this package imports FastAPI."""
