"""What callers ask for: check it, turn it into operations, answer from what was stored."""
