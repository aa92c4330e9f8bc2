"""gRPC: bytes to requests and answers to bytes. Decides nothing."""
