"""What the clock asks for: each duty is one run_once() -> result, and `periodic` is the loop around it."""
