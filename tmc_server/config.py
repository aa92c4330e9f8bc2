"""Configuration: TOML file, then TMC_ environment variables on top, checked once into frozen values.

TMC_SERVER__LISTEN=0.0.0.0:50051 sets [server] listen. docs/configuration.md lists every key; a test compares the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from tmc_common.addresses import HostPort, each_host, is_loopback
from tmc_common.fields import BODY_BYTES
from tmc_server.domain.alerts import Language, WebhookFormat
from tmc_server.domain.egress import Egress
from tmc_server.domain.placement import SHARDS
from tmc_server.domain.retry import DAY_MS
from tmc_server.settings import ConfigError, Section, read

__all__ = ["Config", "ConfigError", "load"]


class ServerConfig(Section):
    """[server]"""

    listen: str = Field("127.0.0.1:50051", description="host:port; port 0 takes a free one")
    lease_seconds: float = Field(
        10, ge=1, le=120, description="a server without a heartbeat for this long counts as gone"
    )
    workers: int = Field(1, ge=1, le=64, description="server processes; each takes the next port")

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        try:
            HostPort.parse(value)
        except ValueError:
            raise ValueError("give host:port, for example 0.0.0.0:50051") from None
        return value


class TlsConfig(Section):
    """[tls]: PEM files; all empty: plaintext."""

    certificate: str | None = Field(None, description="certificate chain of this server, PEM file")
    key: str | None = Field(None, description="its private key, PEM file")
    client_authority: str | None = Field(
        None, description="if set, clients must present a certificate of this authority"
    )
    bind_apps: bool = Field(False, description="an app's calls must present a certificate that names the app")

    @model_validator(mode="after")
    def _pairs(self) -> TlsConfig:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key go together")
        if self.client_authority and not self.certificate:
            raise ValueError("client_authority needs certificate and key")
        if self.bind_apps and not self.client_authority:
            raise ValueError("bind_apps needs client_authority")
        return self


def _address_or_nothing(value: str) -> str:
    try:
        if value:
            HostPort.parse(value)
    except ValueError:
        raise ValueError("give host:port, for example 10.0.0.5:50051") from None
    return value


Address = Annotated[str, AfterValidator(_address_or_nothing)]


def _addresses_or_nothing(value: str) -> str:
    try:
        if value:
            HostPort.parse_all(value)
    except ValueError:
        raise ValueError("give host:port, or several with commas between them") from None
    return value


Addresses = Annotated[str, AfterValidator(_addresses_or_nothing)]


_POSTGRESQL = ("postgresql", "postgresql+psycopg")
_HOST = re.compile(r"[A-Za-z0-9._-]+")


def _database_url(value: SecretStr) -> SecretStr:
    """Validate the URL. Unlike SQLAlchemy's errors, ours never quote the password."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(value.get_secret_value())
        known = url.get_backend_name() in ("sqlite", "mysql", "mariadb") or url.drivername in _POSTGRESQL
        known = known and "@" not in (url.host or "")  # a password that is not encoded
        hosts = (url.host or "").split(",")
        known = known and (len(hosts) == 1 or (all(map(_HOST.fullmatch, hosts)) and len(set(hosts)) == len(hosts)))
    except (ArgumentError, ValueError):
        known = False
    if not known:
        raise ValueError(
            "give postgresql://user:password@host:5432/database, mariadb+mysqldb://user:password@host:3306/database "
            "or sqlite:///file; several hosts of a database share its port: db1,db2:5432; "
            "special characters of a password are percent-encoded"
        ) from None
    return value


DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]


_AMQP = ("amqp", "amqps")


def _has_host(value: SecretStr, schemes: tuple[str, ...], form: str) -> SecretStr:
    """Require a scheme and a host. Unlike urllib's errors, ours never quote the password."""
    text = value.get_secret_value()
    try:
        each = [urlsplit(one) for one in (each_host(text) if schemes == _AMQP else [text])]
        good = not text or all(parts.scheme in schemes and bool(parts.hostname) and parts.port != 0 for parts in each)
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"give {form}; special characters of a password are percent-encoded") from None
    return value


def _amqp_url(value: SecretStr) -> SecretStr:
    form = "amqp://user:password@host:5672/%2F"
    _has_host(value, _AMQP, form)
    text = value.get_secret_value()
    try:
        from pika import URLParameters
    except ModuleNotFoundError:
        return value  # said when it is needed
    try:
        for each in each_host(text):
            URLParameters(each)  # its query has options of its own, and its errors quote their values
    except (ValueError, TypeError, AttributeError, SyntaxError):
        if text:
            raise ValueError(f"give {form} with options that pika knows") from None
    return value


class ShardRange(Section):
    """[[store.shards]]: which database holds which shards."""

    url: DatabaseUrl
    first: Annotated[int, Field(ge=0, lt=SHARDS)] = 0
    last: Annotated[int, Field(ge=0, lt=SHARDS)] = SHARDS - 1


class StoreConfig(Section):
    """[store]"""

    catalog: DatabaseUrl = Field(
        SecretStr("sqlite:///tmc.db"),
        description="SQLAlchemy URL of the catalog; db1,db2:5432 are hosts of one database",
    )
    shards: tuple[ShardRange, ...] = Field(
        (), description="ranges of shards by URL, where they are put at first; empty: all in the catalog's database"
    )
    spare: tuple[DatabaseUrl, ...] = Field(
        (), description="URLs of further databases, to which shards are moved with tmc move-shard"
    )
    change_delay_ms: int = Field(
        5000, ge=1500, le=60_000, description="maximum age of the cached catalog that submits may use"
    )

    @model_validator(mode="after")
    def _complete(self) -> StoreConfig:
        covered = [shard for part in self.shards for shard in range(part.first, part.last + 1)]
        if self.shards and sorted(covered) != list(range(SHARDS)):
            raise ValueError(f"shards must cover 0 to {SHARDS - 1}, each exactly once")
        return self


class LimitsConfig(Section):
    """[limits]"""

    body_bytes: int = Field(BODY_BYTES, ge=1024, le=8 << 20, description="maximum size of a message body")
    request_bytes: int = Field(
        16 << 20, ge=1 << 20, le=256 << 20, description="maximum size of a request, batches included"
    )
    queue: int = Field(
        20_000, ge=1, le=1_000_000, description="operations that may wait per shard; further ones are refused"
    )
    queue_bytes: int = Field(
        64 << 20,
        ge=1 << 20,
        le=4 << 30,
        description="bytes of bodies that may wait per shard, approximately; further ones are refused",
    )
    lanes: int = Field(3, ge=1, le=32, description="writer threads and connections per database (SQLite: 1)")
    items_per_second: int = Field(50_000, ge=0, le=10_000_000, description="items per second of an app; 0: no limit")
    calls_per_second: int = Field(
        5_000, ge=0, le=1_000_000, description="calls per second of an app, per server; 0: no limit"
    )
    bytes_per_second: int = Field(
        128 << 20, ge=0, le=64 << 30, description="bytes per second of an app's requests, per server; 0: no limit"
    )
    open_calls: int = Field(
        1_000, ge=0, le=1_000_000, description="concurrent calls of an app, per server; 0: no limit"
    )
    open_bytes: int = Field(
        64 << 20, ge=0, le=64 << 30, description="bytes of an app's concurrent requests, per server; 0: no limit"
    )
    streams: int = Field(
        200, ge=0, le=1_000_000, description="open streams of an app (Subscribe, Produce); 0: no limit"
    )
    connections: int = Field(2_000, ge=10, le=1_000_000, description="maximum connections to this server")
    connection_seconds: int = Field(
        300,
        ge=1,
        le=86_400,
        description="a connection is renewed after this time, a tenth more or less: servers that were added get calls",
    )
    connection_grace_seconds: int = Field(
        3_600, ge=1, le=86_400, description="streams of a connection that is renewed go on this long"
    )
    calls_per_connection: int = Field(
        384,
        ge=8,
        le=100_000,
        description="concurrent calls per connection, streams included; further ones wait in the client",
    )


class DeliveryConfig(Section):
    """[delivery]"""

    kind: Literal["builtin", "rabbitmq"] = Field(
        "builtin", description="builtin: over gRPC streams, one server; rabbitmq: queues, any number of servers"
    )
    scan_seconds: float = Field(0.5, ge=0.01, le=60, description="maximum pause between scans for due deliveries")
    signatures: bool = Field(
        True,
        description="sign copies in queues, so that consumers refuse copies the center did not sign; docs/signatures.md",
    )


class RabbitmqConfig(Section):
    """[rabbitmq]"""

    url: SecretStr = Field(
        SecretStr(""),
        description="amqp://user:password@host:5672/%2F, or amqps://; nodes of a cluster: host:5672,other:5672; empty: none",
    )
    management: SecretStr = Field(
        SecretStr(""),
        description="http://user:password@host:15672, the management API, for `tmc doctor`; empty: policies are not seen",
    )
    consumer_address: Addresses = Field("", description="host:port,host:port for consumers; empty: those of url")
    queue_type: Literal["quorum", "classic"] = Field(
        "quorum", description="type of the queues that the center declares"
    )
    single_node: bool = Field(
        False, description="the broker is one node: empty queues that accept nothing are deleted and declared again"
    )
    window: int = Field(2000, ge=20, le=100_000, description="maximum unconfirmed copies; half of them for one queue")

    @field_validator("url")
    @classmethod
    def _scheme(cls, value: SecretStr) -> SecretStr:
        return _amqp_url(value)

    @field_validator("management")
    @classmethod
    def _management(cls, value: SecretStr) -> SecretStr:
        return _has_host(value, ("http", "https"), "http://user:password@host:15672")


class KafkaConfig(Section):
    """[kafka]"""

    bootstrap: Addresses = Field("", description="host:port,host:port of its brokers; empty: none")
    settings: dict[str, SecretStr] = Field(
        default_factory=dict, description="of librdkafka, such as security.protocol, ssl.ca.location and sasl.*"
    )

    @property
    def librdkafka(self) -> dict[str, str]:
        """Return the settings of a client; {}: there is no Kafka."""
        given = {name: value.get_secret_value() for name, value in self.settings.items()}
        return {"bootstrap.servers": self.bootstrap, **given} if self.bootstrap else {}


class SubmissionConfig(Section):
    """[submission]: messages that come through queues of a broker."""

    rabbitmq: bool = Field(False, description="read submit queues of [rabbitmq] url; docs/submit-queues.md")
    kafka: bool = Field(False, description="read submit topics of [kafka] bootstrap; docs/submit-queues.md")


class ConsulConfig(Section):
    """[consul]"""

    agent: Address = Field("", description="host:port of the agent; empty: this server is not registered")
    token: SecretStr = Field(SecretStr(""), description="ACL token")
    service: str = Field("tmc", min_length=1, description="service name that callers look up")
    tag: str = Field("", description="tag of this center in Consul")
    advertise: Address = Field("", description="host:port for callers; empty: the address in listen")


class DiscoveryConfig(Section):
    """[discovery]: where producers' services are found."""

    kind: Literal["static", "recorded", "consul"] = Field(
        "recorded",
        description="recorded: where producers say they are; static, the default if there are instances: as they are listed; "
        "consul: by service name and tag",
    )
    instances: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="app or app@tag = list of host:port, for kind static"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_listed(cls, given: Any) -> Any:
        """Use the instances that are listed, if there are any."""
        return {"kind": "static", **given} if isinstance(given, dict) and given.get("instances") else given


def _egress_entries(value: tuple[str, ...]) -> tuple[str, ...]:
    for number, entry in enumerate(value, 1):
        try:
            Egress((entry,))
        except ValueError:
            raise ValueError(f"entry {number} must be host:port or network/bits:port, * for any port") from None
    return value


class ChecksConfig(Section):
    """[checks]: asking producers what became of their transactions."""

    allow: Annotated[tuple[str, ...], AfterValidator(_egress_entries)] = Field(
        (), description="host:port and network/bits:port that checks may reach, * for any port; docs/checks.md"
    )
    authority: str | None = Field(None, description="PEM file: authority for targets with TLS; default: the system's")
    certificate: str | None = Field(None, description="PEM file: client certificate for targets with TLS")
    key: str | None = Field(None, description="its private key, PEM file")

    @model_validator(mode="after")
    def _pairs(self) -> ChecksConfig:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key go together")
        return self


class WebhooksConfig(Section):
    """[webhooks]: deliveries that are posted to URLs."""

    allow: Annotated[tuple[str, ...], AfterValidator(_egress_entries)] = Field(
        (), description="host:port and network/bits:port that webhooks may reach, * for any port; empty: no webhooks"
    )
    authority: str | None = Field(None, description="PEM file: authority for https targets; default: the system's")


class RetentionConfig(Section):
    """[retention]"""

    kind: Literal["none", "archive", "age"] = Field(
        "none", description="which closed messages are removed: none, archived ones, or all that are old enough"
    )
    archive: str = Field(
        "", description="folder or URL of the archive that `tmc pipeline archive` writes, for kind archive"
    )
    keep_hours: float = Field(
        168, ge=1, le=87_600, description="closed messages are kept at least this long: the replay window"
    )
    rows_per_second: int = Field(
        2000, ge=10, le=1_000_000, description="maximum messages removed per second and database"
    )


class AuditConfig(Section):
    """[audit]"""

    seal_keys: tuple[SecretStr, ...] = Field(
        (),
        description="list of secrets that seal the audit trail: the first for new rows, the others of older ones, newest "
        "first; empty: anyone with write access to the database can forge seals",
    )


class OidcConfig(Section):
    """[oidc]: operators may also show ID tokens of an OpenID provider."""

    issuer: str = Field("", description="https:// URL of the OpenID provider; empty: none")
    audiences: tuple[str, ...] = Field((), description="list of client ids whose tokens are accepted")
    claim: str = Field("sub", description="claim that names the operator, such as sub or email")

    @field_validator("issuer")
    @classmethod
    def _is_safe(cls, value: str) -> str:
        url = urlsplit(value)
        if (
            value
            and not (url.scheme == "https" and url.hostname)
            and not (url.scheme == "http" and is_loopback(f"{url.hostname}:{url.port or 80}"))
        ):
            raise ValueError(
                "give an https:// URL, or http:// on loopback: what answers there decides who is an operator"
            )
        return value

    @model_validator(mode="after")
    def _has_audiences(self) -> OidcConfig:
        if self.issuer and not self.audiences:
            raise ValueError("issuer needs audiences: tokens for other programs must not open this one")
        return self


class ApprovalConfig(Section):
    """[approval]: what needs two operators. Set the same on all servers."""

    decide: bool = Field(False, description="decisions by hand need the approval of a second operator")
    bulk_over: int = Field(
        0, ge=0, description="bulk jobs of more deliveries need the approval of a second operator; 0: none do"
    )


class AlertsConfig(Section):
    """[alerts]: besides the log."""

    webhook: SecretStr = Field(
        SecretStr(""), description="http:// or https:// URL that alerts are posted to; empty: none"
    )
    webhook_format: WebhookFormat = Field(
        "json",
        description="what the webhook expects: json (your own program), slack, teams, discord, dingtalk, feishu or wecom",
    )
    language: Language = Field("en", description="of alerts in mails and chats: en or zh")
    smtp_host: str = Field("", description="mail server; empty: no mail")
    smtp_port: int = Field(587, ge=1, le=65_535, description="its port")
    smtp_security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="how mail is encrypted: starttls, tls or none"
    )
    smtp_user: str = Field("", description="user at the mail server; empty: no login")
    smtp_password: SecretStr = Field(SecretStr(""), description="password of the user")
    mail_from: str = Field("", description="sender of mails; needed with smtp_host")
    mail_to: tuple[str, ...] = Field((), description="list of addresses that get every alert by mail")
    mail_to_owner: bool = Field(True, description="also send to the alert address of the topic's owner")

    @model_validator(mode="after")
    def _mail_is_complete(self) -> AlertsConfig:
        if self.smtp_host and "@" not in self.mail_from:
            raise ValueError("mail_from must be an address when smtp_host is set")
        for place, each in enumerate(self.mail_to, 1):
            if not (each.isascii() and "@" in each):
                raise ValueError(f"mail_to must be addresses in ASCII, and number {place} is none")
        if self.smtp_user and self.smtp_security == "none":
            raise ValueError("smtp_security must not be none with smtp_user: the password would travel in the clear")
        return self

    @field_validator("webhook")
    @classmethod
    def _scheme(cls, value: SecretStr) -> SecretStr:
        return _has_host(value, ("http", "https"), "an http:// or https:// address")


class TelemetryConfig(Section):
    """[telemetry]"""

    listen: Address = Field(
        "", description="host:port of the Prometheus endpoint; empty: none; workers take the next ports"
    )
    series: int = Field(
        1000, ge=1, le=100_000, description="topic and app pairs with gauges of their own; the rest share `other`"
    )


class HttpConfig(Section):
    """[http]: the calls as JSON over HTTP, beside gRPC; certificates are those of [tls]."""

    listen: Address = Field("", description="host:port; empty: none; workers take the next ports")


class DevConfig(Section):
    """[dev]: what `tmc dev` gives to names it meets for the first time."""

    retry_interval_ms: int = Field(10_000, ge=10, le=DAY_MS, description="retry interval of new subscriptions")
    transaction_time_ms: int = Field(10_000, ge=1, le=DAY_MS, description="transaction time of new topics")


class LogConfig(Section):
    """[log]"""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum severity")
    format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else JSON lines")


class Config(Section):
    """Everything; each field is a section of the file."""

    server: ServerConfig = ServerConfig()
    http: HttpConfig = HttpConfig()
    tls: TlsConfig = TlsConfig()
    store: StoreConfig = StoreConfig()
    limits: LimitsConfig = LimitsConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    rabbitmq: RabbitmqConfig = RabbitmqConfig()
    kafka: KafkaConfig = KafkaConfig()
    submission: SubmissionConfig = SubmissionConfig()
    consul: ConsulConfig = ConsulConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    checks: ChecksConfig = ChecksConfig()
    webhooks: WebhooksConfig = WebhooksConfig()
    alerts: AlertsConfig = AlertsConfig()
    audit: AuditConfig = AuditConfig()
    oidc: OidcConfig = OidcConfig()
    approval: ApprovalConfig = ApprovalConfig()
    retention: RetentionConfig = RetentionConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    dev: DevConfig = DevConfig()
    log: LogConfig = LogConfig()

    @property
    def files(self) -> dict[str, str]:
        """The PEM files that a server reads at its start, by the name of their key."""
        parts = {"tls": self.tls, "checks": self.checks, "webhooks": self.webhooks}
        fields = {
            "tls": ("certificate", "key", "client_authority"),
            "checks": ("authority", "certificate", "key"),
            "webhooks": ("authority",),
        }
        named = {f"{name}.{key}": getattr(parts[name], key) for name, keys in fields.items() for key in keys}
        return {name: path for name, path in named.items() if path}

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.delivery.kind == "rabbitmq" and not self.rabbitmq.url.get_secret_value():
            raise ValueError("delivery.kind rabbitmq needs [rabbitmq] url")
        if self.submission.rabbitmq and not self.rabbitmq.url.get_secret_value():
            raise ValueError("submission.rabbitmq needs [rabbitmq] url")
        if self.submission.kafka and not self.kafka.bootstrap:
            raise ValueError("submission.kafka needs [kafka] bootstrap")
        if self.discovery.instances and self.discovery.kind != "static":
            raise ValueError("[discovery.instances] is for discovery.kind static: leave out one of the two")
        if self.discovery.kind == "consul" and not self.consul.agent:
            raise ValueError("discovery.kind consul needs [consul] agent")
        listen = HostPort.parse(self.server.listen)
        if self.consul.agent and not self.consul.advertise and listen.is_unspecified:
            raise ValueError("listen names no address that callers could use: set [consul] advertise to host:port")
        if self.server.workers > 1 and self.delivery.kind == "builtin":
            raise ValueError("built-in delivery is for one process: set server.workers to 1, or delivery.kind rabbitmq")
        if self.retention.kind == "archive" and not self.retention.archive:
            raise ValueError(
                "retention.kind archive needs [retention] archive, the folder or URL that the pipeline writes to"
            )
        return self


def load(path: str | None = None, environment: Mapping[str, str] = os.environ) -> Config:
    """Raises ConfigError."""
    return read(Config, "TMC_", path, environment)
