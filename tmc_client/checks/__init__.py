"""The producer's side of checks: answers from the ledger or from functions, over gRPC, ASGI and WSGI."""
