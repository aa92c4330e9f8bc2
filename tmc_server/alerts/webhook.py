"""Alerts as JSON by POST to an address of the operators' own. Sent at least once."""

from __future__ import annotations

import ssl
from contextlib import closing

import httpx

from tmc_common.eventlog import EventLog
from tmc_common.limited import UNCOMPRESSED, Compressed, TooLarge, parsed, read_body
from tmc_server.alerts.bodies import ERROR_FIELD, body_of
from tmc_server.alerts.facts import facts
from tmc_server.alerts.texts import text_of
from tmc_server.domain.alerts import Language, WebhookFormat
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports.alerts import Alert
from tmc_server.outgoing import TimedTransport

log = EventLog("tmc.alert")

_DEADLINE_S = 5.0
_MOST_BYTES = 64 << 10  # of an answer
_LATER = (408, 425, 429)


class WebhookSink:
    """url: from the configuration, so it may lead anywhere.

    Proxies of the environment are not used and redirects not followed: a POST that is led elsewhere would arrive as a GET
    without its body.  form: see `bodies`.
    """

    def __init__(
        self, url: str, form: WebhookFormat = "json", language: Language = "en", deadline_s: float = _DEADLINE_S
    ) -> None:
        self._url = url
        self._form = form
        self._language = language
        self._transport = TimedTransport(deadline_s, ssl.create_default_context())

    def send(self, alert: Alert, catalog: Catalog) -> None:
        """Raises OSError: it was not taken, send it again."""
        try:
            values = facts(alert, catalog)
            body = body_of(self._form, values, text_of(values, self._language))
            request = httpx.Request("POST", self._url, json=body, headers=UNCOMPRESSED)
            with closing(self._transport.handle_request(request)) as answer:
                status = answer.status_code
                said = read_body(answer, _MOST_BYTES, _DEADLINE_S) if self._form in ERROR_FIELD else b""
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise OSError(f"the webhook cannot be reached: {exc!r}") from exc
        except (TooLarge, Compressed) as exc:
            raise OSError(f"the webhook does not say in a few words whether it took the alert: {exc}") from exc
        if 200 <= status < 300:
            self._check_taken(said)
            return
        if status in _LATER or not 400 <= status < 500 or alert.alike:  # of several, the others may be taken
            raise OSError(f"the webhook answers with status {status}")
        log.error("webhook_refused", "an alert was permanently rejected by the webhook (%d); logged only", status)

    def _check_taken(self, said: bytes) -> None:
        """Check the answers of tools that say 200 in any case. Raises OSError."""
        field = ERROR_FIELD.get(self._form)
        if field is None:
            return
        try:
            code = parsed(said).get(field)
        except (ValueError, AttributeError):
            code = None
        if code != 0:
            raise OSError(f"the webhook does not take the alert: {field} is {str(code)[:100]!r}")
