"""One contract for all ways into the center."""
