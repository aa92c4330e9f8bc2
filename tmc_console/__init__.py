"""The web console for operators: a process of its own that speaks only the center's admin service."""
