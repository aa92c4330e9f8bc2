"""Pages: each takes a View and returns a response."""
