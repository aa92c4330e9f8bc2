"""Periodic background duties: each has a run_once() -> result, and `periodic` is the loop around it."""
