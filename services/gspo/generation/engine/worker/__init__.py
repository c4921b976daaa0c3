"""What runs inside vLLM's processes beside the load of a policy."""
