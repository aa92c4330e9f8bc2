"""The users: a service that takes orders, and two that get messages of them; each keeps books of its own."""
