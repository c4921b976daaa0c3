"""The time of a step, the timelines of its rollouts, and the trackers that show its metrics."""
