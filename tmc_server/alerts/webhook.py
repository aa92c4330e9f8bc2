"""Alerts as JSON by POST to an address of the operators' own. Sent at least once."""

from __future__ import annotations

import json
import logging
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError

from tmc_server.alerts.facts import facts
from tmc_server.domain.catalog import Catalog
from tmc_server.domain.ports import Alert

log = logging.getLogger("tmc.alert")

_TIMEOUT_S = 5.0
_LATER = (408, 425, 429)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is led elsewhere would arrive as a GET without its body."""

    def redirect_request(self, *_: object) -> None:
        return None


class WebhookSink:
    """url: from the configuration, so it may lead anywhere; proxies of the environment are not used."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def send(self, alert: Alert, catalog: Catalog) -> None:
        """Raises OSError: it was not taken, send it again."""
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked with the configuration
            self._url,
            data=json.dumps(facts(alert, catalog)).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                answer.read(1024)
        except HTTPError as exc:
            if exc.code not in _LATER and 400 <= exc.code < 500:
                log.error("the webhook refuses an alert for good (%d), it stands in the log alone", exc.code)
                return
            raise
        except HTTPException as exc:
            raise OSError(f"the webhook answers no HTTP: {exc!r}") from exc
