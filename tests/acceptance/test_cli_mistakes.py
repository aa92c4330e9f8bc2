"""What people mistype, forget and misconfigure: one sentence each that names the thing and the way out, never a traceback.

MISTAKES is a table of docs/mistakes.md; write the page with `python -m tests.acceptance.test_cli_mistakes`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.certificates import Authority
from tests.support.cluster import TMC
from tests.support.mistakes import Table
from tests.support.web import web_server
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB
from tmc_storm.services.ports import free_port
from tmc_storm.services.postgresql import PostgreSQL
from tmc_storm.services.rabbitmq import RabbitMQ

NAME = "center.internal"  # the only name in the servers' certificate; nothing resolves it
SECRET = "Hunter2-marked"


@dataclass(kw_only=True)
class Places:
    """What the placeholders in the table below stand for."""

    folder: Path
    plain: str = ""
    tls: str = ""
    mutual: str = ""
    web: str = ""
    nobody: str = ""
    token: str = ""
    mutual_token: str = ""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One row. arguments, environment, says: with placeholders, fields of Places.  needs: the fixture that has more of them."""

    id: str
    arguments: str
    says: str
    environment: dict[str, str] = field(default_factory=dict)
    code: int = 2
    needs: str = ""

    @property
    def row(self) -> list[str]:
        settings = (f"{name}={value}" for name, value in self.environment.items())
        command, says = (_readable(text) for text in (" ".join([*settings, "tmc", self.arguments]), self.says))
        return [self.id, f"`{command}`", str(self.code), says]


# What the page shows instead of a value that differs from run to run.
SHOWN = dict.fromkeys(("plain", "tls", "mutual", "web", "nobody", "database", "broker", "forwarding"), "HOST:PORT") | {
    "plain_port": "PORT",
    "token": "...",
    "forwarding_token": "...",
    "no_database": "mariadb+mysqldb://root@HOST:PORT/tmc_not_there_yet",
}


def _readable(text: str) -> str:
    return text.replace("{folder}/", "").format_map(SHOWN).replace(SECRET, "***")


FILE = "sqlite:///{folder}/fresh.db"
CA = "{folder}/ca.pem"
MISTAKES = [
    # the command line
    Mistake(id="unknown command", arguments="sreve", says="There is no command 'sreve': did you mean 'serve'?"),
    Mistake(id="unknown option", arguments="health --adress x", says="unrecognized arguments: --adress"),
    Mistake(id="unknown admin command", arguments="admin list-app", says="No such command 'list-app'"),
    Mistake(
        id="nothing to consume",
        arguments="consume nosuch",
        says="'nosuch' names no consumer: give MODULE:NAME, for example shop.consumers:consumer",
    ),
    Mistake(
        id="no such module",
        arguments="consume no_such:thing",
        says="'no_such:thing': there is no module 'no_such' to import from here",
    ),
    Mistake(id="no processes", arguments="consume a:b --processes 0", says="--processes must be 1 or more"),
    # the configuration
    Mistake(
        id="no such file", arguments="serve -c {folder}/none.toml", says="Cannot read {folder}/none.toml: No such file"
    ),
    Mistake(id="not toml", arguments="serve -c {folder}/ca.pem", says="{folder}/ca.pem is not TOML:"),
    Mistake(
        id="typo in a section",
        arguments="serve",
        environment={"TMC_SERVR__LISTEN": "a:1"},
        says="servr: there is no such key; did you mean 'server'?",
    ),
    Mistake(
        id="typo in a key",
        arguments="doctor",
        environment={"TMC_SERVER__LISTN": "a:1"},
        says="server.listn: there is no such key; did you mean 'listen'?",
    ),
    Mistake(
        id="no port",
        arguments="serve",
        environment={"TMC_SERVER__LISTEN": "localhost"},
        says="server.listen: give host:port, for example 0.0.0.0:50051.",
    ),
    Mistake(
        id="not a number",
        arguments="init",
        environment={"TMC_LIMITS__QUEUE": "many"},
        says="limits.queue: Input should be a valid integer",
    ),
    Mistake(
        id="no database URL",
        arguments="init",
        environment={"TMC_STORE__CATALOG": f"db:{SECRET}"},
        says="store.catalog: give postgresql://user:***@host:5432/database, mariadb+mysqldb://user:***@host:3306/database",
    ),
    Mistake(
        id="password not encoded",
        arguments="init",
        environment={"TMC_STORE__CATALOG": f"postgresql://tmc:a@{SECRET}@db:5432/tmc"},
        says="special characters of a password are percent-encoded",
    ),
    Mistake(
        id="no broker URL",
        arguments="serve",
        environment={"TMC_RABBITMQ__URL": f"amqp://a:{SECRET}/x@h"},
        says="rabbitmq.url: give amqp://user:***@host:5672/%2F; special characters of a password are percent-encoded.",
    ),
    Mistake(
        id="key without certificate",
        arguments="serve",
        environment={"TMC_TLS__KEY": "{folder}/server.key"},
        says="tls: certificate and key go together",
    ),
    Mistake(
        id="no certificate there",
        arguments="serve",
        environment={"TMC_TLS__CERTIFICATE": "{folder}/none.pem", "TMC_TLS__KEY": "{folder}/server.key"},
        says="tls.certificate: cannot read {folder}/none.pem: no such file.",
    ),
    Mistake(
        id="broker is missing",
        arguments="serve",
        environment={"TMC_DELIVERY__KIND": "rabbitmq"},
        says="delivery.kind rabbitmq needs [rabbitmq] url",
    ),
    Mistake(
        id="workers without a broker",
        arguments="serve --workers 2",
        says="Built-in delivery is for one process: use one worker, or delivery.kind rabbitmq.",
    ),
    # the start
    Mistake(id="not prepared", arguments="serve", says="run tmc init"),
    Mistake(
        id="no folder",
        arguments="init",
        environment={"TMC_STORE__CATALOG": "sqlite:////no-such-folder/x.db"},
        says="Cannot open /no-such-folder/x.db: the folder /no-such-folder does not exist.",
    ),
    Mistake(
        id="not a database",
        arguments="serve",
        environment={"TMC_STORE__CATALOG": "sqlite:///{folder}/ca.pem"},
        says="Cannot open {folder}/ca.pem: it is not an SQLite file.",
    ),
    Mistake(
        id="port taken",
        arguments="dev --data {folder}/dev.db --port {plain_port}",
        says="Cannot listen on 127.0.0.1:{plain_port}: choose another address ([server] listen, or --port of tmc dev) "
        "or stop what uses it.",
    ),
    Mistake(
        id="metrics port taken",
        arguments="dev --data {folder}/dev.db --port 0",
        environment={"TMC_TELEMETRY__LISTEN": "{plain}"},
        says="Cannot listen on {plain} for metrics (Address already in use): set [telemetry] listen (TMC_TELEMETRY__LISTEN) to "
        "another address, or stop what uses it.",
    ),
    Mistake(
        id="wrong password of the database",
        arguments="serve",
        environment={"TMC_STORE__CATALOG": f"mariadb+mysqldb://somebody:{SECRET}@{{database}}/tmc"},
        says="The database at {database} refuses the user 'somebody': check user, password and rights in the URL of [store].",
        needs="databases",
    ),
    Mistake(
        id="no such database",
        arguments="serve",
        environment={"TMC_STORE__CATALOG": "{no_database}"},
        says="There is no database 'tmc_not_there_yet' at {database}: create it, or run tmc init.",
        needs="databases",
    ),
    Mistake(
        id="database away",
        arguments="init",
        environment={"TMC_STORE__CATALOG": f"mariadb+mysqldb://u:{SECRET}@{{nobody}}/tmc"},
        says="The database at {nobody} does not answer",
    ),
    # tmc health and tmc admin
    Mistake(
        id="health, nobody there",
        arguments="health {nobody}",
        code=1,
        says="Nobody listens on {nobody}: is the server running, and is this its address (TMC_ADDRESS)?",
    ),
    Mistake(
        id="health, no address",
        arguments="health localhost",
        says="'localhost' is no address of a server: give host:port.",
    ),
    Mistake(
        id="health, no host",
        arguments="health no-such-host.invalid:1",
        code=1,
        says="There is no host 'no-such-host.invalid': check the address (TMC_ADDRESS).",
    ),
    Mistake(
        id="admin, nobody there",
        arguments="admin --address {nobody} list-apps",
        code=1,
        says="Nobody listens on {nobody}: is the server running, and is this its address (TMC_ADDRESS)?",
    ),
    Mistake(
        id="admin, wrong token",
        arguments="admin --address {plain} --token wrong list-apps",
        code=1,
        says="This needs a valid admin token: TMC_ADMIN_TOKEN, TMC_ADMIN_TOKEN_FILE, --token",
    ),
    Mistake(
        id="admin, no token",
        arguments="admin --address {plain} list-apps",
        code=1,
        says="This needs a valid admin token: TMC_ADMIN_TOKEN, TMC_ADMIN_TOKEN_FILE, --token",
    ),
    Mistake(
        id="health, the port of an HTTP server",
        arguments="health {web}",
        code=1,
        says="What answers at {web} speaks HTTP/1, not gRPC: is this the server's address (TMC_ADDRESS)?",
    ),
    Mistake(
        id="plaintext to TLS",
        arguments="health {tls}",
        code=1,
        says="{tls} speaks TLS: give --authority CA.pem (TMC_CA).",
    ),
    Mistake(
        id="admin, plaintext to TLS",
        arguments="admin --address {tls} --token x list-apps",
        code=1,
        says="{tls} speaks TLS: give --authority CA.pem (TMC_CA).",
    ),
    Mistake(
        id="plaintext to mutual TLS",
        arguments="health {mutual}",
        code=1,
        says="{mutual} speaks TLS: give --authority CA.pem (TMC_CA).",
    ),
    Mistake(
        id="TLS to plaintext",
        arguments="health {plain}",
        environment={"TMC_CA": CA},
        code=1,
        says="{plain} does not speak TLS: leave out --authority (TMC_CA), or set [tls] of the server.",
    ),
    Mistake(
        id="admin, TLS to plaintext",
        arguments="admin --address {plain} --token x list-apps",
        environment={"TMC_CA": CA},
        code=1,
        says="{plain} does not speak TLS: leave out --authority (TMC_CA), or set [tls] of the server.",
    ),
    Mistake(
        id="another name in the certificate",
        arguments="health {tls}",
        environment={"TMC_CA": CA},
        code=1,
        says="give a name that is in it: --server-name NAME (TMC_SERVER_NAME).",
    ),
    Mistake(
        id="another authority",
        arguments="health {tls} --server-name center.internal --authority {folder}/other/ca.pem",
        code=1,
        says="The certificate of {tls} is refused (unable to get local issuer certificate): check --authority (TMC_CA).",
    ),
    Mistake(
        id="no client certificate",
        arguments="health {mutual} --server-name center.internal",
        environment={"TMC_CA": CA},
        code=1,
        says="{mutual} hangs up: it wants a client certificate of an authority it trusts, give --certificate and --key "
        "(TMC_CERTIFICATE, TMC_CERTIFICATE_KEY).",
    ),
    Mistake(
        id="certificate without key",
        arguments="health {tls} --certificate {folder}/operator.pem",
        says="--certificate and --key go together (TMC_CERTIFICATE, TMC_CERTIFICATE_KEY).",
    ),
    Mistake(
        id="authority is not there",
        arguments="health {tls} --authority {folder}/none.pem",
        says="--authority: cannot read {folder}/none.pem: No such file or directory.",
    ),
    Mistake(
        id="authority is no certificate",
        arguments="health {tls} --authority {folder}/server.key",
        code=1,
        says="--authority must be a PEM file of certificates, --key the private key of --certificate.",
    ),
    Mistake(
        id="name without TLS",
        arguments="health {plain} --server-name x",
        says="--server-name is for TLS: give --authority too (TMC_CA).",
    ),
    Mistake(
        id="token in the clear",
        arguments="admin --address center.example:50051 --token {token} list-apps",
        says="The admin token would travel in the clear to center.example:50051: give --authority CA.pem (TMC_CA), or --insecure "
        "(TMC_INSECURE=1) in a network that you trust.",
    ),
    Mistake(
        id="forward to a missing exchange",
        arguments="admin --address {forwarding} --token {forwarding_token} subscribe order.paid orders --forward rabbitmq:evnets",
        code=1,
        says="There is no exchange 'evnets' in virtual host '/' of the broker at {broker}: check the name, declare it first, "
        "or say --untried.",
        needs="broker",
    ),
    Mistake(
        id="forward of an unknown kind",
        arguments="admin --address {forwarding} --token {forwarding_token} subscribe order.paid orders --forward rabitmq:events",
        code=1,
        says="forward.kind must be one that this center can do",
        needs="broker",
    ),
]
MARKS = {"databases": [pytest.mark.mariadb], "broker": [pytest.mark.services]}
TABLE = Table(
    source="tests/acceptance/test_cli_mistakes.py",
    columns=["mistake", "command", "status", "sentence"],
    rows=[mistake.row for mistake in MISTAKES],
)


def _run(arguments: str, environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TMC_")}
    return subprocess.run(
        [TMC, *arguments.split()], capture_output=True, text=True, timeout=60, env=clean | environment, cwd=folder
    )


@contextmanager
def _server(folder: Path, name: str, **settings: str) -> Iterator[tuple[str, str]]:
    """Its address and its admin token; it serves."""
    address = f"127.0.0.1:{free_port()}"
    environment = settings | {"TMC_SERVER__LISTEN": address, "TMC_STORE__CATALOG": f"sqlite:///{folder}/{name}.db"}
    token = _run("init", environment, folder).stdout.strip()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([TMC, "serve"], env=os.environ | environment, stderr=log)
    try:
        eventually(lambda: "serving on port" in (folder / f"{name}.log").read_text(), seconds=60)
        yield address, token
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "other").mkdir()
    Authority(folder / "other")
    authority = Authority(folder)
    certificate, key = authority.issue("server", f"DNS:{NAME}")
    authority.issue("operator", "DNS:operator")
    tls = {"TMC_TLS__CERTIFICATE": str(certificate), "TMC_TLS__KEY": str(key)}
    mutual = tls | {"TMC_TLS__CLIENT_AUTHORITY": str(authority.certificate)}
    with ExitStack() as stack:
        found = Places(folder=folder, nobody=f"127.0.0.1:{free_port()}")
        found.plain, found.token = stack.enter_context(_server(folder, "plain"))
        found.tls, _ = stack.enter_context(_server(folder, "tls", **tls))
        found.web = f"127.0.0.1:{stack.enter_context(web_server())}"
        found.mutual, found.mutual_token = stack.enter_context(_server(folder, "mutual", **mutual))
        yield found


@pytest.fixture(scope="module")
def databases(mariadb: MariaDB) -> dict[str, str]:
    return {"database": f"127.0.0.1:{mariadb.port}", "no_database": mariadb.url("tmc_not_there_yet")}


@pytest.fixture(scope="module")
def broker(rabbitmq: RabbitMQ, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server that can forward, with topic order.paid."""
    folder = tmp_path_factory.mktemp("broker")
    with _server(folder, "forwarding", TMC_RABBITMQ__URL=rabbitmq.url) as (address, token):
        for arguments in ("register-app orders", "register-topic order.paid --owner orders"):
            done = _run(f"admin --address {address} --token {token} {arguments}", {}, folder)
            assert done.returncode == 0, done.stderr
        yield {"broker": f"127.0.0.1:{rabbitmq.port}", "forwarding": address, "forwarding_token": token}


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, id=each.id, marks=MARKS.get(each.needs, [])) for each in MISTAKES]
)
def test_a_mistake_gets_one_sentence(places: Places, mistake: Mistake, request: pytest.FixtureRequest) -> None:
    more = request.getfixturevalue(mistake.needs) if mistake.needs else {}
    values = vars(places) | {"plain_port": places.plain.rpartition(":")[2]} | more
    defaults = (
        {"TMC_STORE__CATALOG": FILE, "TMC_SERVER__LISTEN": "127.0.0.1:0"} if "admin" not in mistake.arguments else {}
    )
    environment = {name: value.format_map(values) for name, value in (defaults | mistake.environment).items()}
    done = _run(mistake.arguments.format_map(values), environment, places.folder)
    output = done.stdout + done.stderr
    assert mistake.says.format_map(values) in output
    assert done.returncode == mistake.code
    assert "Traceback" not in output
    assert SECRET not in output
    assert places.token not in output


def test_the_page_lists_every_mistake() -> None:
    assert TABLE.is_on_the_page()


def test_health_and_admin_reach_a_server_by_address_whose_certificate_names_it_otherwise(places: Places) -> None:
    environment = {"TMC_CA": str(places.folder / "ca.pem"), "TMC_SERVER_NAME": NAME}
    assert _run(f"health {places.tls}", environment, places.folder).stdout == "SERVING\n"
    done = _run(f"admin --address {places.tls} --token x list-apps", environment, places.folder)
    assert "UNAUTHENTICATED" in done.stderr  # the call arrived; the token is wrong


def test_health_and_admin_show_a_client_certificate(places: Places) -> None:
    environment = {
        "TMC_CA": str(places.folder / "ca.pem"),
        "TMC_CERTIFICATE": str(places.folder / "operator.pem"),
        "TMC_CERTIFICATE_KEY": str(places.folder / "operator.key"),
        "TMC_SERVER_NAME": NAME,
        "TMC_ADDRESS": places.mutual,
        "TMC_ADMIN_TOKEN": places.mutual_token,
    }
    assert _run("health", environment, places.folder).stdout == "SERVING\n"
    done = _run("admin list-apps", environment, places.folder)
    assert (done.returncode, done.stdout) == (0, "{}\n")


def test_a_token_goes_in_the_clear_only_where_that_is_said(places: Places) -> None:
    away = "admin --address 192.0.2.1:1 --token x"  # an address of documentation: nobody is there
    refused = _run(f"{away} list-apps", {}, places.folder)
    assert (refused.returncode, "in the clear" in refused.stderr) == (2, True)
    for arguments, environment in ((f"{away} --insecure", {}), (away, {"TMC_INSECURE": "1"})):
        assert "in the clear" not in _run(f"{arguments} list-apps --help", environment, places.folder).stderr
    assert _run(f"admin --address {places.plain} --token {places.token} list-apps", {}, places.folder).returncode == 0


def test_a_wrong_user_is_said_at_once_and_names_user_and_host_alone(
    database_server: MariaDB | PostgreSQL, tmp_path: Path
) -> None:
    url = sa.make_url(database_server.url("tmc")).set(username="somebody", password=SECRET)
    for command in ("serve", "init", "doctor"):
        done = _run(command, {"TMC_STORE__CATALOG": url.render_as_string(hide_password=False)}, tmp_path)
        assert done.returncode == 2
        assert f"The database at 127.0.0.1:{database_server.port} refuses the user 'somebody'" in done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_a_missing_database_is_named_and_init_makes_it(database_server: MariaDB | PostgreSQL, tmp_path: Path) -> None:
    environment = {"TMC_STORE__CATALOG": database_server.url("tmc_not_there_yet")}
    for command in ("serve", "doctor"):
        done = _run(command, environment, tmp_path)
        assert (done.returncode, "There is no database 'tmc_not_there_yet'" in done.stderr) == (2, True)
    assert _run("init", environment, tmp_path).returncode == 0
    assert _run("doctor", environment, tmp_path).returncode == 0


def test_a_spare_database_is_looked_at_as_the_others_are(database_server: MariaDB | PostgreSQL, tmp_path: Path) -> None:
    url = sa.make_url(database_server.url("tmc_gone"))
    stranger = url.set(username="somebody", password=SECRET).render_as_string(hide_password=False)
    environment = {"TMC_STORE__CATALOG": f"sqlite:///{tmp_path}/c.db", "TMC_STORE__SPARE": json.dumps([stranger])}
    done = _run("init", environment, tmp_path)
    said = "refuses the user 'somebody': check user, password and rights in the URL of [store]."
    assert (done.returncode, said in done.stderr, SECRET in done.stderr) == (2, True, False), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("7",), "give one of --to, --undo and --confirm"),
        (("7", "--to", "x", "--undo"), "give one of --to, --undo and --confirm"),
        (("32", "--to", "x"), "'32' is no shard, and no range of them: they are 0 to 31"),
        (("a", "--undo"), "'a' is no shard"),
        (("7", "--undo"), "Shard 7 is in c.db, and not on its way anywhere."),
        (("7", "--confirm"), "Shard 7 is in c.db, and not on its way anywhere."),
        (("7", "--to", "x"), "--to 'x' names 0 of the databases: give a part of one's address or identity. There are"),
    ],
)
def test_a_move_that_makes_no_sense(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    environment = {"TMC_STORE__CATALOG": "sqlite:///c.db"}
    assert _run("init", environment, tmp_path).returncode == 0
    done = _run(" ".join(["move-shard", *arguments]), environment, tmp_path)
    flowing = " ".join(done.stderr.replace("\u2502", " ").split())
    assert (done.returncode, said in flowing) == (2, True), done.stderr


@pytest.mark.parametrize("scheme", ["mariadb+mysqldb", "postgresql"])
@pytest.mark.parametrize("command", ["init", "doctor"])
def test_init_and_doctor_do_not_wait_for_a_database(tmp_path: Path, command: str, scheme: str) -> None:
    port = free_port()
    done = _run(command, {"TMC_STORE__CATALOG": f"{scheme}://u:{SECRET}@127.0.0.1:{port}/tmc"}, tmp_path)
    assert done.returncode == 2
    assert f"The database at 127.0.0.1:{port} does not answer" in done.stderr
    assert SECRET not in done.stderr


@contextmanager
def _starting(environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as stream:
        process = subprocess.Popen([TMC, "serve"], env=os.environ | environment, stderr=stream)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(MariaDB, marks=pytest.mark.mariadb), pytest.param(PostgreSQL, marks=pytest.mark.postgresql)],
)
def test_a_server_waits_for_a_database_that_is_away_and_serves_when_it_is_back(
    kind: type[MariaDB] | type[PostgreSQL], tmp_path: Path
) -> None:
    database, log = kind(), tmp_path / "log"
    address = f"127.0.0.1:{free_port()}"
    environment = {"TMC_STORE__CATALOG": database.url("tmc"), "TMC_SERVER__LISTEN": address}
    try:
        assert _run("init", environment, tmp_path).returncode == 0
        database.kill()
        with _starting(environment, log) as process:
            eventually(lambda: "waiting for the database" in log.read_text(), seconds=60)
            assert _run(f"health {address}", {}, tmp_path).returncode == 1
            assert process.poll() is None
            database.start()
            eventually(lambda: "serving on port" in log.read_text(), seconds=60)
            assert _run(f"health {address}", {}, tmp_path).stdout == "SERVING\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert log.read_text().count("waiting for the database") == 1
    finally:
        database.stop()


def test_a_waiting_server_stops_on_a_signal(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        url = f"mariadb+mysqldb://u:{SECRET}@127.0.0.1:{reserved.getsockname()[1]}/tmc"
        with _starting({"TMC_STORE__CATALOG": url}, tmp_path / "log") as process:
            eventually(lambda: "waiting for the database" in (tmp_path / "log").read_text(), seconds=60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert SECRET not in (tmp_path / "log").read_text()


if __name__ == "__main__":
    TABLE.write()
