"""Closed messages as Parquet: written, verified, brought back."""
