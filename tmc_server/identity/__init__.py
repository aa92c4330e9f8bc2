"""Adapters: who callers are, beside keys and tokens of the center."""
