"""Figures of a time span, as tables and as one page."""
