"""The ways to ask a producer what became of its local transaction. Each is one kind, by the contract of domain.ports.Asker."""
