"""The files in deploy/kubernetes are valid by the schemas, and true of the programs that they start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tmc_server.config import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((FOLDER / name).read_text())
]


def _pods() -> dict[str, dict[str, Any]]:
    """Return pod specifications by the name of what makes them."""
    made_by = [each for each in MANIFESTS if each["kind"] in ("Job", "Deployment")]
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in made_by}


MANIFESTS_OF_PODS = ("tmc-init", "tmc", "tmc-console")


def test_every_file_is_used() -> None:
    made_from = [KUSTOMIZATION["configMapGenerator"][0]["files"], KUSTOMIZATION["secretGenerator"][0]["envs"]]
    named = {*KUSTOMIZATION["resources"], *(name for names in made_from for name in names)}
    assert {path.name for path in FOLDER.iterdir()} == named | {"kustomization.yaml"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
@pytest.mark.parametrize("version", ["1.31", "1.35"])
def test_a_manifest_is_valid(manifest: dict[str, Any], version: str) -> None:
    assert kubernetes_validate.validate(manifest, version, strict=True)


def test_servers_load_the_configuration() -> None:
    lines = (FOLDER / "secrets.env").read_text().splitlines()
    secrets = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    config = load(str(FOLDER / "tmc.toml"), secrets)
    ports = {each["name"]: each["containerPort"] for each in _pods()["tmc"]["containers"][0]["ports"]}
    assert config.server.listen == f"0.0.0.0:{ports['grpc']}"
    assert config.telemetry.listen == f"0.0.0.0:{ports['metrics']}"


@pytest.mark.parametrize("name", MANIFESTS_OF_PODS)
def test_a_pod_has_no_rights_it_does_not_need(name: str) -> None:
    pods = _pods()
    assert set(pods) == set(MANIFESTS_OF_PODS)
    (container,) = pods[name]["containers"]
    user = re.search(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    assert pods[name]["securityContext"]["runAsUser"] == int(user[1])
    assert pods[name]["automountServiceAccountToken"] is False
    rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == rights
    assert container["image"] == KUSTOMIZATION["images"][0]["name"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pods[name]["volumes"]}


@pytest.mark.parametrize("name", MANIFESTS_OF_PODS)
def test_a_pod_starts_a_command_that_there_is(name: str) -> None:
    _is_known(_pods()[name]["containers"][0]["args"])


def test_services_and_budgets_select_pods() -> None:
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in MANIFESTS if each["kind"] == "Deployment"]
    for each in MANIFESTS:
        if each["kind"] == "Service":
            assert each["spec"]["selector"] in labels
        if each["kind"] == "PodDisruptionBudget":
            assert each["spec"]["selector"]["matchLabels"] in labels


def _is_known(arguments: list[str]) -> None:
    """Ask the command for its help: all options are there."""
    done = subprocess.run([sys.executable, "-m", "tmc_cli", arguments[0], "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = [each for each in arguments[1:] if each.startswith("--")]
    assert [each for each in options if each not in done.stdout] == []
