"""The same service with and without us, for the line counts of docs/databases.md."""
