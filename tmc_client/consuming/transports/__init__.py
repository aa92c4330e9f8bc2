"""How copies reach a consumer."""
