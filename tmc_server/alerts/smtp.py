"""Alerts as mail. Sent at least once."""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate, make_msgid, parseaddr
from typing import Literal

from tmc_common.eventlog import EventLog
from tmc_server.alerts.facts import Facts, facts
from tmc_server.alerts.texts import text_of
from tmc_server.domain.alerts import Language
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports.alerts import Alert

log = EventLog("tmc.alert")

_DEADLINE_S = 10.0
_FOR_GOOD = range(500, 600)


@dataclass(frozen=True, kw_only=True)
class MailServer:
    """user "": no login.  security: starttls and tls verify the server's certificate."""

    host: str
    port: int
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str = ""
    password: str = ""

    @contextmanager
    def connection(self, deadline_s: float) -> Iterator[smtplib.SMTP]:
        """A connection that has logged in. Raises OSError. deadline_s: of each step."""
        context = ssl.create_default_context()
        if self.security == "tls":
            made: smtplib.SMTP = smtplib.SMTP_SSL(self.host, self.port, timeout=deadline_s, context=context)
        else:
            made = smtplib.SMTP(self.host, self.port, timeout=deadline_s)
        with made:
            if self.security == "starttls":
                made.starttls(context=context)
            if self.user:
                made.login(self.user, self.password)
            yield made


class SmtpSink:
    """sender, recipients: addresses.  to_owner: also to the topic's owner."""

    def __init__(
        self,
        server: MailServer,
        sender: str,
        recipients: Sequence[str],
        to_owner: bool,
        language: Language = "en",
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self._server = server
        self._sender = sender
        self._recipients = recipients
        self._to_owner = to_owner
        self._language = language
        self._deadline_s = deadline_s

    def send(self, alert: Alert, catalog: Catalog) -> None:
        """Raises OSError: it was not taken, send it again. Recipients that are refused for good are logged."""
        values = facts(alert, catalog)
        recipients = [*self._recipients, *([str(values["owner_email"])] if self._to_owner else [])]
        recipients = [each for each in dict.fromkeys(recipients) if _is_address(each)]
        if not recipients:
            log.warning(
                "mail_without_recipient",
                "nobody gets mail about %s: no recipient is configured, and its owner has no address",
                alert.kind,
            )
            return
        try:
            refused = self._deliver(self._mail(values), recipients)
        except smtplib.SMTPRecipientsRefused as exc:
            refused = exc.recipients
        if any(code not in _FOR_GOOD for code, _ in refused.values()):
            raise smtplib.SMTPRecipientsRefused(refused)  # the others get it twice
        for recipient in refused:
            log.error("mail_refused", "the mail server refuses %s: an alert does not reach this address", recipient)

    def _mail(self, values: Facts) -> EmailMessage:
        text = text_of(values, self._language)
        mail = EmailMessage()
        mail["Subject"] = text.subject
        mail["From"] = self._sender
        mail["To"] = "undisclosed-recipients:;"
        mail["Date"] = formatdate()
        mail["Message-ID"] = make_msgid(domain=parseaddr(self._sender)[1].rpartition("@")[2])
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content("\n".join(text.lines) + "\n")
        return mail

    def _deliver(self, mail: EmailMessage, recipients: Sequence[str]) -> dict[str, tuple[int, bytes]]:
        """Returns: the recipients that were refused; some were not."""
        with self._server.connection(self._deadline_s) as connection:
            return connection.send_message(mail, parseaddr(self._sender)[1], list(recipients))


def _is_address(text: str) -> bool:
    """Return whether every mail server takes it; one that needs SMTPUTF8 would hold up the others."""
    if text and not (text.isascii() and "@" in text):
        log.error("mail_refused", "%r is no address that every mail server takes: an alert does not reach it", text)
        return False
    return bool(text)
