"""The calls of the center as JSON over HTTP, behind the same edge as over gRPC."""
