"""MCP servers: reached over HTTP or started in sandboxes, their tools listed and called.

The coordinator lists the tools for the prompts, generators call them. The protocol itself is of the package `mcp`.
"""
