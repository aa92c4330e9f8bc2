"""Where alerts go."""
