"""The surroundings of a run under faults: network, disk, proxy to Redis, and services with faults from files."""
