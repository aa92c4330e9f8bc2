"""`tmc admin`: every command is one admin RPC; listings are tables on a terminal, and JSON for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tmc_cli import fail
from tmc_cli.admin.calling import with_json
from tmc_cli.admin.commands import COMMANDS
from tmc_cli.admin.rpcs import Rpc
from tmc_cli.target import DEFAULT_ADDRESS, Target, first_that_listens
from tmc_common.addresses import is_loopback

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Register apps, topics and subscriptions; inspect messages.",
)


@app.callback()
def connect(
    context: typer.Context,
    address: Annotated[
        str, typer.Option(envvar="TMC_ADDRESS", help="host:port of a server; several with commas.")
    ] = DEFAULT_ADDRESS,
    token: Annotated[
        str,
        typer.Option(
            envvar="TMC_ADMIN_TOKEN", help="Your token, or the one that `tmc init` printed.", show_default=False
        ),
    ] = "",
    token_file: Annotated[str, typer.Option(envvar="TMC_ADMIN_TOKEN_FILE", help="A file that contains it.")] = "",
    authority: Annotated[str, typer.Option(envvar="TMC_CA", help="PEM file: use TLS and trust this authority.")] = "",
    certificate: Annotated[str, typer.Option(envvar="TMC_CERTIFICATE", help="PEM file: client certificate.")] = "",
    key: Annotated[
        str, typer.Option(envvar="TMC_CERTIFICATE_KEY", help="PEM file: the certificate's private key.")
    ] = "",
    server_name: Annotated[
        str, typer.Option(envvar="TMC_SERVER_NAME", help="The name in the server's certificate, if not the host.")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="TMC_INSECURE", help="Send the token in the clear to other machines.")
    ] = False,
) -> None:
    """Administer a running center."""
    address = first_that_listens(address)
    target = Target(address=address, authority=authority, certificate=certificate, key=key, server_name=server_name)
    target.check()
    if token_file and (not token or (_is_given(context, "token_file") and not _is_given(context, "token"))):
        token = _token_in(token_file)
    if token and not (target.is_tls or is_loopback(address) or insecure):
        fail(
            f"The admin token would travel in the clear to {address}: give --authority CA.pem (TMC_CA), or --insecure "
            "(TMC_INSECURE=1) in a network that you trust."
        )
    context.obj = (target, token)


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether it is given on the command line, and not in the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _token_in(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        fail(f"No token can be read from {path} (--token-file, TMC_ADMIN_TOKEN_FILE): {exc}.")


for each in COMMANDS:
    name, command = (each.words, each.command()) if isinstance(each, Rpc) else (each.__name__.replace("_", "-"), each)
    app.command(name)(with_json(command))
