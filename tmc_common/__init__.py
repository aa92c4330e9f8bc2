"""What the SDK, the server and the command line share; it imports nothing of theirs."""
