"""Parts of vLLM's processes that are ours."""
