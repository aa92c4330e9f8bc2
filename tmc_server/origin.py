"""Where the call came from that is being answered: a part of every audit row, which no request carries."""

from contextvars import ContextVar

ORIGIN: ContextVar[str] = ContextVar("tmc_origin", default="")
"""A peer as gRPC names it; "": the work is not done for a call. Work that is handed to another thread or task takes it along."""

LONGEST_ORIGIN = 64
"""Characters; a peer of gRPC has fewer, but for zones of IPv6 addresses."""
