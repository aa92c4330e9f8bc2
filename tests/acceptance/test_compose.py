"""docker-compose.yml and Dockerfile without Docker: every command, port, environment key and health check they name is run
or looked up here, against the same services started outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from tests.support.cluster import ROOT, TMC
from tmc_server.config import load
from tmc_storm.eventually import eventually
from tmc_storm.services.consul import Consul, program
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.rabbitmq import RabbitMQ, _script

pytestmark = [pytest.mark.mariadb, pytest.mark.postgresql, pytest.mark.services]
CHOICES = {".env": "mariadb", "deploy/compose/postgresql.env": "postgresql"}
"""Files that choose a database, and its profile."""
SERVERS = ("server1", "server2", "server3")


@pytest.fixture(scope="module", params=CHOICES)
def chosen(request: pytest.FixtureRequest) -> dict[str, str]:
    """Values that stand for ${NAME} in the file."""
    lines = (ROOT / request.param).read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert values["COMPOSE_PROFILES"] == CHOICES[request.param]
    return values


@pytest.fixture(scope="module")
def compose(chosen: dict[str, str]) -> dict[str, Any]:
    """The services that are started."""
    text = (ROOT / "docker-compose.yml").read_text()
    for name, value in chosen.items():
        text = text.replace(f"${{{name}}}", value)
    services = yaml.safe_load(text)["services"]
    profile = [chosen["COMPOSE_PROFILES"]]
    return {name: service for name, service in services.items() if service.get("profiles", profile) == profile}


def _mariadb(settings: Mapping[str, str], server: MariaDB) -> dict[str, str]:
    database = sa.create_engine(server.create("tmc_compose"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with database.connect() as connection:
        user = f"'{settings['MARIADB_USER']}'@'%%'"
        connection.exec_driver_sql(f"CREATE OR REPLACE USER {user} IDENTIFIED BY '{settings['MARIADB_PASSWORD']}'")
        connection.exec_driver_sql(f"GRANT ALL ON tmc_compose.* TO {user}")
    return {"mariadb:3306/tmc": f"127.0.0.1:{server.port}/tmc_compose"}


def _postgresql(settings: Mapping[str, str], server: PostgreSQL) -> dict[str, str]:
    """The image makes this user a superuser; here it owns its database and nothing else."""
    root = sa.create_engine(server.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with root.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE compose LOGIN PASSWORD '{settings['POSTGRES_PASSWORD']}'")
        connection.exec_driver_sql("CREATE DATABASE tmc_compose OWNER compose")
    assert settings["POSTGRES_USER"] == settings["POSTGRES_DB"] == "tmc"
    return {"tmc:look-around@postgresql:5432/tmc": f"compose:look-around@127.0.0.1:{server.port}/tmc_compose"}


@pytest.fixture(scope="module")
def outside(
    compose: dict[str, Any], chosen: dict[str, str], mariadb: MariaDB, postgresql: PostgreSQL, rabbitmq: RabbitMQ
) -> Iterator[dict[str, str]]:
    """What the names inside the file are here, with the rights that it gives: a user of one database, a token of Consul's."""
    kind = chosen["COMPOSE_PROFILES"]
    settings = compose[kind]["environment"]
    database = _mariadb(settings, mariadb) if kind == "mariadb" else _postgresql(settings, postgresql)
    lists = json.loads(compose["consul"]["environment"]["CONSUL_LOCAL_CONFIG"])["acl"]
    lists["tokens"]["master"] = lists["tokens"].pop("initial_management")  # its name before Consul 1.11
    agent = Consul(acl=lists)
    inside = {
        **database,
        "tmc:look-around@rabbitmq:5672": f"guest:guest@127.0.0.1:{rabbitmq.port}",
        "127.0.0.1:5672": f"127.0.0.1:{rabbitmq.port}",
        "consul:8500": agent.address,
    }
    rights = compose["consul-rights"]
    path = f"{Path(program()).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | _replaced(rights["environment"], inside)

    def is_healthy() -> bool:
        command = compose["consul"]["healthcheck"]["test"][1:]
        return subprocess.run(command, capture_output=True, env=environment).returncode == 0

    eventually(is_healthy)
    for _ in range(2):  # as after a second `docker compose up`
        subprocess.run([*rights["entrypoint"], *rights["command"]], check=True, capture_output=True, env=environment)
    yield inside
    agent.stop()


def _replaced(environment: Mapping[str, str], outside: Mapping[str, str]) -> dict[str, str]:
    values = dict(environment)
    for inside, here in outside.items():
        values = {name: value.replace(inside, here) for name, value in values.items()}
    return values


def _of_server(environment: Mapping[str, str], outside: Mapping[str, str], port: int) -> dict[str, str]:
    values = _replaced(environment, outside)
    values["TMC_SERVER__LISTEN"] = values["TMC_SERVER__LISTEN"].replace("0.0.0.0:50051", f"127.0.0.1:{port}")
    values["TMC_CONSUL__ADVERTISE"] = f"127.0.0.1:{port}"
    values["TMC_TELEMETRY__LISTEN"] = f"127.0.0.1:{free_port()}"
    return os.environ | values


def test_every_environment_key_is_one_of_ours(compose: dict[str, Any]) -> None:
    for name in (*SERVERS, "init"):
        config = load(None, compose[name]["environment"])
        assert (config.delivery.kind, config.discovery.kind) == ("rabbitmq", "recorded")


def test_published_ports_are_those_that_are_listened_on(compose: dict[str, Any]) -> None:
    for name in SERVERS:
        config = load(None, compose[name]["environment"])
        inside = {int(port.split(":")[2]) for port in compose[name]["ports"]}
        assert all(port.startswith("127.0.0.1:") for port in compose[name]["ports"])  # keys travel in the clear
        listening = {int(address.rpartition(":")[2]) for address in (config.server.listen, config.telemetry.listen)}
        assert inside <= listening
        assert config.consul.advertise == f"{name}:50051"
    published = [port.split(":")[1] for name in SERVERS for port in compose[name]["ports"]]
    assert len(published) == len(set(published))


def _shop_works(admin: Callable[..., str], address: str, folder: Path) -> None:
    """Run the quickstart's shop outside: what it knows is a published port, its keys, and the broker's user."""
    keys = {f"{app.upper()}_KEY": json.loads(admin("register-app", app))["key"] for app in ("orders", "coupons")}
    admin("register-topic", "order.paid", "--owner", "orders")
    admin("subscribe", "order.paid", "coupons")
    environment = os.environ | keys | {"TMC_BROKER_USER": "guest", "TMC_BROKER_PASSWORD": "guest"}
    shop = [
        sys.executable,
        str(ROOT / "examples/quickstart/order_service.py"),
        address,
        f"sqlite:///{folder}/orders.db",
    ]
    coupons = f"sqlite:///{folder}/coupons.db"
    consumer = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/quickstart/coupon_service.py"), address, coupons], env=environment
    )
    try:
        subprocess.run([*shop, "10"], check=True, env=environment, timeout=60)  # of ten, the ninth is cancelled
        given = sa.create_engine(coupons, poolclass=sa.NullPool)
        query = sa.text("SELECT order_id FROM coupons ORDER BY order_id")

        def numbers() -> list[int]:
            with given.connect() as connection:
                return list(connection.execute(query).scalars())

        eventually(lambda: numbers() == [*range(1, 9), 10], 60)
    finally:
        consumer.terminate()
        consumer.wait(60)


@pytest.mark.takes_turns("compose")
def test_the_servers_start_find_each_other_pass_their_health_checks_and_serve_a_shop(
    compose: dict[str, Any], outside: dict[str, str], tmp_path: Path
) -> None:
    def command(name: str) -> list[str]:
        return [TMC, *compose[name]["command"]]  # the image's entry point is tmc

    made = subprocess.run(
        command("init"),
        env=_of_server(compose["init"]["environment"], outside, 50051),
        check=True,
        capture_output=True,
        text=True,
    )
    running = []
    try:
        for name in SERVERS:
            port = free_port()
            with open(tmp_path / name, "wb") as log:
                process = subprocess.Popen(
                    command(name), env=_of_server(compose[name]["environment"], outside, port), stdout=log, stderr=log
                )
            running.append((port, process))
            kind, program_, *arguments = compose[name]["healthcheck"]["test"]
            assert (kind, program_) == ("CMD", "tmc")
            arguments = [argument.replace("50051", str(port)) for argument in arguments]
            eventually(
                lambda a=arguments: subprocess.run([TMC, *a], capture_output=True, check=False).returncode == 0, 60
            )
        address = f"127.0.0.1:{running[0][0]}"

        def admin(*words: str) -> str:
            command = [TMC, "admin", "--address", address, "--token", made.stdout.strip(), *words]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        assert admin("list-servers").count('"alive": true') == 3
        _shop_works(admin, address, tmp_path)
        environment = compose["server1"]["environment"]
        agent, token = outside["consul:8500"], environment["TMC_CONSUL__TOKEN"]
        registered = urllib.request.Request(
            f"http://{agent}/v1/health/service/tmc?passing&tag={environment['TMC_CONSUL__TAG']}",
            headers={"X-Consul-Token": token},
        )
        eventually(lambda: len(json.load(urllib.request.urlopen(registered, timeout=5))) == 3, 60)
    finally:
        for _, process in running:
            process.terminate()
        codes = [process.wait(60) for _, process in running]
    assert codes == [0, 0, 0]
    unwell = subprocess.run([TMC, "health", f"127.0.0.1:{running[0][0]}"], capture_output=True, text=True, check=False)
    assert unwell.returncode == 1
    assert str(running[0][0]) in unwell.stderr


def test_the_health_checks_of_the_other_services_run(
    compose: dict[str, Any],
    chosen: dict[str, str],
    mariadb: MariaDB,
    postgresql: PostgreSQL,
    rabbitmq: RabbitMQ,
    outside: dict[str, str],
) -> None:
    kind = chosen["COMPOSE_PROFILES"]
    ping = [part for part in compose[kind]["healthcheck"]["test"][1:] if not part.startswith("--password")]
    port = mariadb.port if kind == "mariadb" else postgresql.port
    subprocess.run([*ping, f"--port={port}"], check=True, capture_output=True)
    _, diagnostics, *arguments = compose["rabbitmq"]["healthcheck"]["test"]
    subprocess.run(
        [_script(diagnostics), "-n", rabbitmq.node, *arguments],
        env=rabbitmq._environment,
        check=True,
        capture_output=True,
    )
    _, consul, *arguments = compose["consul"]["healthcheck"]["test"]
    assert consul == "consul"
    environment = os.environ | compose["consul"]["environment"] | {"CONSUL_HTTP_ADDR": outside["consul:8500"]}
    subprocess.run([program(), *arguments], env=environment, check=True, capture_output=True)


def test_the_dockerfile_copies_what_there_is_and_installs_what_exists(compose: dict[str, Any]) -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        assert all((ROOT / source).exists() for source in sources.split())
    packages = {word for line in re.findall(r"--no-install-recommends ([^&\n]+)", text) for word in line.split()}
    known = subprocess.run(["apt-cache", "pkgnames"], check=True, capture_output=True, text=True).stdout.split()
    assert packages <= set(known)
    assert 'ENTRYPOINT ["tmc"]' in text
    assert all(compose[name]["image"] == "tmc-center" for name in (*SERVERS, "init"))


def test_docker_compose_itself_accepts_the_file_where_it_is_installed() -> None:
    """Where there is no such tool the file was read and run above."""
    tool = shutil.which("docker-compose")
    if tool is not None:
        subprocess.run([tool, "-f", str(ROOT / "docker-compose.yml"), "config"], check=True, capture_output=True)
