"""Three servers over TLS whose certificates hold a DNS name and no address: every client finds and verifies them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

import tmc_client as tmc
from tests.support.certificates import Authority
from tests.support.cluster import TMC, Cluster
from tests.support.grpcurl import Reflection
from tmc_storm.eventually import eventually

_NAME = "localhost"  # the only name in it; servers are addressed as 127.0.0.1


class TlsCluster(Cluster):
    """mutual: clients have to show a certificate, services one that names their app, Consul's agent for its health checks."""

    def __init__(self, folder: Path, mutual: bool) -> None:
        self.folder = folder
        self.mutual = mutual
        authority = Authority(folder)
        certificate, key = authority.issue("center", f"DNS:{_NAME}")
        agent, agent_key = authority.issue("agent", "DNS:agent.test")
        for app in ("orders", "coupons"):
            authority.issue(app, f"DNS:{app}")
        settings = {
            "TMC_TLS__CERTIFICATE": str(certificate),
            "TMC_TLS__KEY": str(key),
        }
        if mutual:
            settings["TMC_TLS__CLIENT_AUTHORITY"] = str(authority.certificate)
            settings["TMC_TLS__BIND_APPS"] = "true"
        of_agent: dict[str, str | bool] = {
            "ca_file": str(authority.certificate),
            "cert_file": str(agent),
            "key_file": str(agent_key),
            "enable_agent_tls_for_checks": True,
            "server_name": _NAME,
        }
        super().__init__(servers=3, consul=True, consul_settings=of_agent, **settings)

    def _pem(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def channel(self, target: str) -> grpc.Channel:
        shown = (self._pem("orders.key"), self._pem("orders.pem")) if self.mutual else (None, None)
        credentials = grpc.ssl_channel_credentials(self._pem("ca.pem"), *shown)
        options = [
            ("grpc.lb_policy_name", "round_robin"),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.ssl_target_name_override", _NAME),
        ]
        return grpc.secure_channel(target, credentials, options)

    def tls(self, app: str) -> tmc.Tls:
        shown = {"certificate": f"{self.folder}/{app}.pem", "key": f"{self.folder}/{app}.key"} if self.mutual else {}
        return tmc.Tls(authority=f"{self.folder}/ca.pem", server_name=_NAME, **shown)

    def command(self, *arguments: str, address: str) -> subprocess.CompletedProcess[str]:
        variables = {"TMC_ADDRESS": address, "TMC_ADMIN_TOKEN": self.token, "TMC_CA": f"{self.folder}/ca.pem"}
        variables["TMC_SERVER_NAME"] = _NAME
        if self.mutual:
            variables |= {
                "TMC_CERTIFICATE": f"{self.folder}/orders.pem",
                "TMC_CERTIFICATE_KEY": f"{self.folder}/orders.key",
            }
        environment = os.environ | variables
        return subprocess.run([TMC, *arguments], env=environment, capture_output=True, text=True, check=False)

    def grpcurl(self, program: str, method: str, address: str) -> subprocess.CompletedProcess[str]:
        shown = ["-cert", f"{self.folder}/orders.pem", "-key", f"{self.folder}/orders.key"] if self.mutual else []
        command = [program, "-cacert", f"{self.folder}/ca.pem", "-authority", _NAME, *shown]
        command += ["-H", f"authorization: Bearer {self.token}", address, method]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def health_checks(self) -> list[Mapping[str, Any]]:
        """What Consul's agent says of the servers."""
        assert self.consul is not None
        with urllib.request.urlopen(f"http://{self.consul.address}/v1/agent/checks") as answer:
            found: dict[str, Mapping[str, Any]] = json.load(answer)
            return list(found.values())


@pytest.fixture(scope="module", params=[False, True], ids=["server certificates", "client certificates too"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    with TlsCluster(tmp_path_factory.mktemp("tls"), mutual=request.param) as made:
        made.register("orders", "coupons")
        made.in_effect(made.subscribe("order.paid", "coupons"))
        yield made


@pytest.mark.parametrize("way", ["by a list", "by Consul"])
def test_the_sdk_verifies_each_of_three_servers(cluster: TlsCluster, way: str) -> None:
    address = cluster.addresses if way == "by a list" else cluster.by_name
    if way == "by Consul":
        eventually(lambda: len(cluster.health_checks()) == 3)
    got: set[str] = set()
    sent = {f"{way}-{number}" for number in range(12)}
    with (
        tmc.connect(address, app="orders", key=cluster.keys["orders"], tls=cluster.tls("orders")) as orders,
        tmc.connect(address, app="coupons", key=cluster.keys["coupons"], tls=cluster.tls("coupons")) as coupons,
    ):
        consumer = tmc.Consumer(coupons)

        @consumer.listener("order.paid")
        def handle(body: bytes, message: tmc.Message) -> None:
            got.add(message.key)

        with consumer:
            for key in sent:
                orders.publish("order.paid", b"x", key=key)
            eventually(lambda: got >= sent)


def test_consul_checks_the_health_of_all_three(cluster: TlsCluster) -> None:
    """They register as passing; what counts is what the agent's own look found."""
    looked = eventually(
        lambda: [c for c in cluster.health_checks() if c["Output"]] if len(cluster.health_checks()) == 3 else []
    )
    eventually(lambda: len([check for check in cluster.health_checks() if "success" in check["Output"]]) == 3)
    assert {check["Status"] for check in cluster.health_checks()} == {"passing"}, looked


def test_operators_reach_each_server(cluster: TlsCluster) -> None:
    for server in cluster.servers:
        health = cluster.command("health", address=server.address)
        assert (health.returncode, health.stderr) == (0, "")
        apps = cluster.command("admin", "list-apps", address=server.address)
        assert apps.returncode == 0, apps.stderr
        assert "coupons" in apps.stdout
        with cluster.channel(server.address) as channel:
            assert "tmc.v1.AdminService" in Reflection(channel).services()
        program = shutil.which("grpcurl")  # where it is installed; the line above asks as it does
        if program is not None:
            done = cluster.grpcurl(program, "tmc.v1.AdminService/ListApps", server.address)
            assert done.returncode == 0, done.stderr
            assert {app["id"] for app in json.loads(done.stdout)["apps"]} == {"orders", "coupons"}


def test_a_server_that_is_not_the_center_is_refused(cluster: TlsCluster) -> None:
    """Its certificate is of the same authority, and names somebody else."""
    strange = tmc.Tls(authority=f"{cluster.folder}/ca.pem", server_name="other.test")
    with tmc.connect(cluster.addresses, app="orders", key="k", tls=strange) as orders:
        with pytest.raises(tmc.Unavailable):
            orders.publish("order.paid", b"x", key="strange")
    refused = cluster.command("health", "--server-name", "other.test", address=cluster.servers[0].address)
    assert refused.returncode != 0
    assert "--server-name" in refused.stderr
