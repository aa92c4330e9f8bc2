"""Connecting: where the servers are, the channel to them, and the calls over it."""
