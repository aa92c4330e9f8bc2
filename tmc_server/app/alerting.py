"""Where alerts go, and the duties that bring them there."""

from __future__ import annotations

from collections.abc import Mapping

from tmc_server.alerts.log import LogSink
from tmc_server.alerts.smtp import MailServer, SmtpSink
from tmc_server.alerts.webhook import WebhookSink
from tmc_server.app.opening import OpenStore
from tmc_server.app.upkeep import Wakeup
from tmc_server.config import AlertsConfig
from tmc_server.domain.ports.alerts import AlertSink
from tmc_server.duties.alerting import Alerting, Grouping, Resolving
from tmc_server.duties.periodic import Periodic
from tmc_server.store.alert_outbox import SqlAlertOutbox

_ALERTING_S = 5.0
_RESOLVING_S = 10.0


def sinks_of(wanted: AlertsConfig) -> dict[str, AlertSink]:
    sinks: dict[str, AlertSink] = {"log": LogSink()}
    if webhook := wanted.webhook.get_secret_value():
        sinks["webhook"] = WebhookSink(webhook, wanted.webhook_format, wanted.language)
    if wanted.smtp_host:
        recipients, to_owner = wanted.mail_to, wanted.mail_to_owner
        sinks["smtp"] = SmtpSink(mail_server(wanted), wanted.mail_from, recipients, to_owner, wanted.language)
    return sinks


def mail_server(wanted: AlertsConfig) -> MailServer:
    return MailServer(
        host=wanted.smtp_host,
        port=wanted.smtp_port,
        security=wanted.smtp_security,
        user=wanted.smtp_user,
        password=wanted.smtp_password.get_secret_value(),
    )


def alerting(outbox: SqlAlertOutbox, sinks: Mapping[str, AlertSink], store: OpenStore) -> list[Periodic]:
    """One that groups, and one per sink: a sink that hangs holds up no other."""
    wakeup = Wakeup()
    sending = [
        Periodic(f"alerting {name}", Alerting(outbox, name, sink, store.watch).run_once, _ALERTING_S)
        for name, sink in sinks.items()
    ]
    wakeup.register(sending)
    return [
        Periodic("alerting", Grouping(outbox, list(sinks), wakeup.notify).run_once, _ALERTING_S),
        Periodic("resolving alerts", Resolving(outbox, wakeup.notify).run_once, _RESOLVING_S),
        *sending,
    ]
