"""Registered functions: names, versions, usage; in Redis, with a copy on disk."""
