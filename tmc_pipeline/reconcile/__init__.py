"""What producers, the center and consumers noted about each message, compared."""
