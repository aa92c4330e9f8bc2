"""Findings of `tmc doctor` about the rest of the configuration: files, TLS, Consul, checks, Kafka, mail, logins, the archive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from tmc_common.extras import extra_of
from tmc_common.printable import without_secrets
from tmc_server.app.alerting import mail_server
from tmc_server.archives.folder import ArchiveFolder
from tmc_server.certificates import EXPIRES_SOON, CertificateUnusable, read_key_pair
from tmc_server.config import Config
from tmc_server.domain.ports.retention import ListUnreadable
from tmc_server.store.dialects.contract import Finding

_DEADLINE_S = 3


def examine_neighbors(config: Config, center: str | None) -> Iterator[Finding]:
    """Yield a finding for each that is configured. center: identity of the catalog; None: it cannot be read."""
    yield from _files(config)
    if config.tls.certificate:
        yield _certificate(config)
    if config.consul.agent:
        yield _consul(config)
    yield _checks(config)
    if config.kafka.bootstrap:
        yield _kafka(config)
    if config.alerts.smtp_host:
        yield _mail(config)
    if config.oidc.issuer:
        yield _logins(config)
    if config.retention.kind == "archive" and center is not None:
        yield _archive(config.retention.archive, center)


def _files(config: Config) -> Iterator[Finding]:
    for name, path in config.files.items():
        if not os.access(path, os.R_OK):
            yield Finding(setting=name, value=path, must="be a file that this user may read", ok=False)


def _certificate(config: Config) -> Finding:
    setting = "TLS, certificate"
    try:
        expires = read_key_pair(config.tls).expires
    except (OSError, CertificateUnusable) as exc:
        return Finding(setting=setting, value="", must=f"be usable. {exc}", ok=False)
    is_fresh = expires - datetime.now(UTC) > EXPIRES_SOON
    must = "be renewed now: replace the files, servers read them again"
    return Finding(setting=setting, value=f"valid until {expires:%Y-%m-%d}", must=must, ok=is_fresh)


def _consul(config: Config) -> Finding:
    """A wrong token is refused whatever one asks; whether it may register shows at a server's start alone."""
    setting, consul = "Consul", config.consul
    try:
        from tmc_common.consul import AGENT_ERRORS, agent_client
    except ModuleNotFoundError as exc:
        return not_installed(setting, exc)
    try:
        client = agent_client(consul.agent, consul.token.get_secret_value(), timeout_s=_DEADLINE_S)
        _, nodes = client.health.service(consul.service, passing=True, tag=consul.tag or None)
    except AGENT_ERRORS as exc:
        said = str(exc).strip() or type(exc).__name__
        must = f"answer: check [consul] agent and token ({said[:200]})"
        return Finding(setting=setting, value=consul.agent, must=must, ok=False)
    return Finding(setting=setting, value=f"{consul.agent}, {len(nodes)} passing servers", must="", ok=True)


def _checks(config: Config) -> Finding:
    """A center that can ask nobody is well as long as no producer dies, so it is not BAD."""
    kind = config.discovery.kind
    value = f"services are found by discovery.kind {kind}"
    if kind == "recorded" and not config.checks.allow:
        value = "NOBODY can be asked: [checks] allow does not list where services answer; their messages would stay undecided"
    elif kind == "static" and not config.discovery.instances:
        value = "NOBODY can be asked: [discovery.instances] is empty; messages of services would stay undecided"
    return Finding(setting="checks", value=value, must="", ok=True)


def _kafka(config: Config) -> Finding:
    bootstrap = config.kafka.bootstrap

    def ask() -> str:
        from tmc_server.delivery.kafka import count_brokers

        return f"{bootstrap}, {count_brokers(config.kafka.librdkafka, _DEADLINE_S)} brokers"

    return _asked("Kafka", bootstrap, "answer: check [kafka] bootstrap and settings", ask)


def _mail(config: Config) -> Finding:
    place = f"{config.alerts.smtp_host}:{config.alerts.smtp_port}"

    def ask() -> str:
        with mail_server(config.alerts).connection(_DEADLINE_S):
            return place

    return _asked("mail server", place, "take mail from this user: check smtp_* of [alerts]", ask)


def _logins(config: Config) -> Finding:
    wanted = config.oidc

    def ask() -> str:
        from tmc_server.identity.oidc import OidcTokens, Provider

        OidcTokens(Provider(issuer=wanted.issuer, audiences=wanted.audiences, claim=wanted.claim)).refresh()
        return wanted.issuer

    return _asked("OpenID provider", wanted.issuer, "publish its keys: check [oidc] issuer", ask)


def _asked(setting: str, place: str, must: str, ask: Callable[[], str]) -> Finding:
    """ask: returns what is well, raises OSError or ValueError, or the ModuleNotFoundError of what is not installed."""
    try:
        return Finding(setting=setting, value=ask(), must="", ok=True)
    except ModuleNotFoundError as exc:
        return not_installed(setting, exc)
    except (OSError, ValueError) as exc:
        return Finding(setting=setting, value=place, must=f"{must} ({str(exc)[:200]})", ok=False)


def not_installed(setting: str, exc: ModuleNotFoundError) -> Finding:
    return Finding(setting=setting, value="", must=f"be installed with {exc.name}: {extra_of(exc)}", ok=False)


def _archive(url: str, center: str) -> Finding:
    setting = "retention.archive"
    try:
        ArchiveFolder(url, center).removals()
    except (ValueError, ListUnreadable) as exc:
        must = f"be the archive of this center. {without_secrets(str(exc))}"
        return Finding(setting=setting, value=without_secrets(url), must=must, ok=False)
    return Finding(setting=setting, value="readable", must="", ok=True)
