"""`tmc admin`: every command is one admin RPC; listings are tables on a terminal, and JSON for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tmc_cli import fail
from tmc_cli.admin import (
    alerts,
    apps,
    bulk,
    checks,
    lists,
    messages,
    operators,
    proposals,
    servers,
    subscriptions,
    topics,
)
from tmc_cli.admin.calling import with_json
from tmc_cli.target import DEFAULT_ADDRESS, Target
from tmc_common.addresses import is_loopback

COMMANDS = (
    apps.register_app,
    apps.add_app_key,
    apps.drop_old_app_key,
    apps.rotate_check_token,
    apps.disable_app,
    apps.enable_app,
    apps.list_apps,
    topics.register_topic,
    topics.update_topic,
    topics.pause_topic,
    topics.resume_topic,
    topics.list_topics,
    subscriptions.subscribe,
    subscriptions.unsubscribe,
    subscriptions.pause_subscription,
    subscriptions.resume_subscription,
    subscriptions.repair_order,
    subscriptions.list_subscriptions,
    subscriptions.delivery_keys,
    subscriptions.rotate_delivery_key,
    messages.get_message,
    messages.overview,
    messages.search,
    messages.failures,
    messages.why,
    messages.timeline,
    lists.stuck,
    lists.list_messages,
    lists.list_consumptions,
    messages.reactivate,
    messages.deliver_now,
    messages.cancel,
    messages.replay,
    bulk.bulk,
    bulk.get_bulk,
    bulk.stop_bulk,
    bulk.list_bulk,
    bulk.list_bulk_items,
    alerts.list_alerts,
    alerts.acknowledge_alert,
    alerts.silence_alerts,
    alerts.end_silence,
    alerts.list_silences,
    lists.list_audit,
    operators.verify_audit,
    operators.who_am_i,
    operators.register_operator,
    operators.update_operator,
    operators.rotate_token,
    operators.remove_operator,
    operators.list_operators,
    servers.list_servers,
    servers.drain_server,
    servers.undrain_server,
    servers.shard_map,
    servers.list_instances,
    checks.set_check,
    checks.get_check,
    checks.check_now,
    checks.try_check,
    checks.reactivate_check,
    checks.reactivate_checks,
    checks.decide,
    proposals.list_proposals,
    proposals.approve,
    proposals.reject,
    servers.get_configuration,
)
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
    address: Annotated[str, typer.Option(envvar="TMC_ADDRESS", help="host:port of a server.")] = DEFAULT_ADDRESS,
    token: Annotated[
        str,
        typer.Option(
            envvar="TMC_ADMIN_TOKEN", help="Your token, or the one that `tmc init` printed.", show_default=False
        ),
    ] = "",
    token_file: Annotated[str, typer.Option(envvar="TMC_ADMIN_TOKEN_FILE", help="A file that contains it.")] = "",
    authority: Annotated[str, typer.Option(envvar="TMC_CA", help="PEM file: use TLS and trust this authority.")] = "",
    certificate: Annotated[str, typer.Option(envvar="TMC_CERTIFICATE", help="PEM file: client certificate.")] = "",
    key: Annotated[str, typer.Option(envvar="TMC_KEY", help="PEM file: the certificate's private key.")] = "",
    server_name: Annotated[
        str, typer.Option(envvar="TMC_SERVER_NAME", help="The name in the server's certificate, if not the host.")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="TMC_INSECURE", help="Send the token in the clear to other machines.")
    ] = False,
) -> None:
    """Administer a running center."""
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
    """On the command line, and not in the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _token_in(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        fail(f"No token can be read from {path} (--token-file, TMC_ADMIN_TOKEN_FILE): {exc}.")


for command in COMMANDS:
    app.command(command.__name__.replace("_", "-"))(with_json(command))
