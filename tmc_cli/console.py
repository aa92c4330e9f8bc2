"""`tmc console`: the web console."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tmc_cli import fail, say
from tmc_cli.options import command
from tmc_cli.target import DEFAULT_ADDRESS, Target, first_that_listens
from tmc_common.addresses import HostPort, is_loopback
from tmc_console.running import ConsoleConfig, run
from tmc_console.sso_names import Provider

app = command()


@app.command()
def console(
    listen: Annotated[
        str, typer.Option(envvar="TMC_CONSOLE_LISTEN", help="host:port for browsers; port 0 takes a free one.")
    ] = "127.0.0.1:50052",
    address: Annotated[
        str,
        typer.Option(
            envvar="TMC_ADDRESS",
            help="host:port of a server; of several with commas, the first that listens at the start.",
        ),
    ] = DEFAULT_ADDRESS,
    authority: Annotated[
        str, typer.Option(envvar="TMC_CA", help="PEM file: TLS to the server, trusting this authority.")
    ] = "",
    certificate: Annotated[str, typer.Option(envvar="TMC_CERTIFICATE", help="PEM file: client certificate.")] = "",
    key: Annotated[
        str, typer.Option(envvar="TMC_CERTIFICATE_KEY", help="PEM file: the certificate's private key.")
    ] = "",
    server_name: Annotated[
        str, typer.Option(envvar="TMC_SERVER_NAME", help="The name in the server's certificate, if not the host.")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="TMC_INSECURE", help="Send tokens in the clear to other machines.")
    ] = False,
    host: Annotated[
        list[str] | None, typer.Option(help="A name by which browsers reach the console; several are allowed.")
    ] = None,
    tls_certificate: Annotated[str, typer.Option(help="PEM file: the console's own certificate chain.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file: its private key.")] = "",
    oidc_issuer: Annotated[
        str, typer.Option(envvar="TMC_CONSOLE_OIDC_ISSUER", help="URL of an OpenID provider to log in with.")
    ] = "",
    oidc_client_id: Annotated[
        str, typer.Option(envvar="TMC_CONSOLE_OIDC_CLIENT_ID", help="The console's client id there.")
    ] = "",
    oidc_client_secret: Annotated[
        str,
        typer.Option(
            envvar="TMC_CONSOLE_OIDC_CLIENT_SECRET",
            help="Its secret; without one, it is a public client.",
            show_default=False,
        ),
    ] = "",
    behind_tls: Annotated[bool, typer.Option("--behind-tls", help="A proxy in front of it speaks TLS.")] = False,
) -> None:
    """Run the web console. Operators log in with their tokens."""
    address = first_that_listens(address)
    target = Target(address=address, authority=authority, certificate=certificate, key=key, server_name=server_name)
    target.check()
    try:
        HostPort.parse(listen)
    except ValueError:
        fail(f"--listen {listen!r} is no address: give host:port.")
    if bool(tls_certificate) != bool(tls_key):
        fail("--tls-certificate and --tls-key go together.")
    if not (target.is_tls or is_loopback(address) or insecure):
        fail(f"Tokens would travel in the clear to {address}: give --authority CA.pem (TMC_CA), or --insecure.")
    if not (tls_certificate or behind_tls or is_loopback(listen) or insecure):
        fail(
            f"Tokens would travel in the clear to {listen}: give --tls-certificate and --tls-key, --behind-tls, or --insecure."
        )
    for option, path in (("--tls-certificate", tls_certificate), ("--tls-key", tls_key)):
        if path and not os.access(path, os.R_OK):
            fail(f"{option}: cannot read {path}.")
    if bool(oidc_issuer) != bool(oidc_client_id):
        fail("--oidc-issuer and --oidc-client-id go together.")
    provider = (
        Provider(issuer=oidc_issuer, client_id=oidc_client_id, secret=oidc_client_secret) if oidc_issuer else None
    )
    config = ConsoleConfig(
        provider=provider,
        listen=listen,
        center=address,
        hosts=host or (),
        credentials=target.credentials(),
        options=target.options,
        certificate=tls_certificate,
        key=tls_key,
        secure=behind_tls,
    )
    scheme = "https" if tls_certificate or behind_tls else "http"
    try:
        run(config, lambda port: say(f"console on {scheme}://{HostPort(HostPort.parse(listen).host, port)}"))
    except OSError as exc:
        fail(f"The console cannot listen on {listen}: {exc.strerror or exc}.")
