"""Makes logged steps again in a folder of their own: `gspo replay` starts it as a process."""
