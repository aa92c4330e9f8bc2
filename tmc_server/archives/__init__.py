"""What the pipeline archived, as far as the center has to know it."""
