"""The kinds of checks: each module implements domain.ports.checks.Asker."""
