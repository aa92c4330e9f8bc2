"""Where services are: the center for its callers, producers for the center."""
