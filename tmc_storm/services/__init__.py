"""Private instances of what a center stands on: a database, a broker, an agent, any program. Stopped by their process ids."""
