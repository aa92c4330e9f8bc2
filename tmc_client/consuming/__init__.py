"""Consuming: listeners and their copies, from the transport to the handler and back to the center."""
