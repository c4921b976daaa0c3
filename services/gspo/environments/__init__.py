"""The environments of conversations: functions in the reward service, servers over HTTP or OpenEnv, and MCP servers.

Each is an Environment (environment.py): generators begin, step, resume, end and hand over its episodes.
"""
