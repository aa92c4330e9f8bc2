"""`tmc health`: one call of grpc.health.v1. Containers run it every few seconds, so it imports grpc and nothing else."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import grpc

from tmc_cli import fail
from tmc_cli.target import DEFAULT_ADDRESS, Target
from tmc_common.printable import escaped

# HealthCheckResponse has one field, an enum: generated classes would cost more to import than the call takes.
_STATES = {b"": "UNKNOWN", b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}
_TIMEOUT_S = 3.0


def run(args: Sequence[str], prog_name: str) -> None:
    """Ends with 0 when the server serves, 1 when it does not, 2 when the options are wrong."""
    target = _target(args, prog_name)
    target.check()
    with target.channel() as channel:
        check: Callable[..., bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            state = _STATES.get(check(b"", timeout=_TIMEOUT_S), "UNKNOWN")
        except grpc.RpcError as exc:
            fail(target.explain(exc), code=1)
    sys.stdout.write(f"{escaped(state)}\n")
    raise SystemExit(0 if state == "SERVING" else 1)


def _target(args: Sequence[str], prog_name: str) -> Target:
    parser = argparse.ArgumentParser(
        prog=prog_name, description="Ask a server whether it serves; exit code 1 when it does not.", allow_abbrev=False
    )
    known = os.environ.get
    address = known("TMC_ADDRESS", DEFAULT_ADDRESS)
    parser.add_argument("address", nargs="?", default=address, help="host:port of a server (TMC_ADDRESS)")
    parser.add_argument("--authority", default=known("TMC_CA", ""), help="PEM file: use TLS and trust it (TMC_CA)")
    parser.add_argument("--certificate", default=known("TMC_CERTIFICATE", ""), help="PEM file: client certificate")
    parser.add_argument("--key", default=known("TMC_CERTIFICATE_KEY", ""), help="its private key, PEM file")
    parser.add_argument("--server-name", default=known("TMC_SERVER_NAME", ""), help="the name in its certificate")
    return Target(**vars(parser.parse_args(args)))
