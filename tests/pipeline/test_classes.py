"""The file with Spark's classes: who uses it, and that a run that was killed leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.conftest import QUICK_JAVA
from tests.pipeline.running import TMC, toml_of
from tests.pipeline.test_command_line import refusal, run
from tests.support.filled import FilledCenter
from tmc_pipeline.classes import NewClasses, classes_file, shared_classes
from tmc_pipeline.errors import CannotRun
from tmc_pipeline.session import check_java
from tmc_storm.eventually import eventually
from tmc_storm.services.mariadb import MariaDB

pytestmark = pytest.mark.mariadb


@pytest.fixture(scope="module")
def config(mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    path = folder / "pipeline.toml"
    center = FilledCenter(mariadb, prefix="sharing")
    java = f"{QUICK_JAVA} -XX:ErrorFile={folder}/crash.log"
    spark = {"profile": "fast", "options": {"spark.driver.extraJavaOptions": java}}
    path.write_text(toml_of({"spark": spark} | center.settings(folder, ledgers=False)))
    return path


def _started(job: str, config: Path, cache: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [TMC, "pipeline", job, "--config", str(config)],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture
def archiving(config: Path, cached: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = _started("archive", config, cached.parent.parent)
    yield process
    process.wait(120)


def _maps(session: int, path: Path) -> bool:
    """Whether a process of this session has mapped the file."""
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and os.getsid(int(entry.name)) == session
                and str(path) in (entry / "maps").read_text()
            ):
                return True
        except OSError:
            continue
    return False


def test_a_job_uses_the_file(archiving: subprocess.Popen[bytes], cached: Path) -> None:
    assert eventually(lambda: _maps(archiving.pid, cached))


def test_it_belongs_to_one_java_and_one_spark(monkeypatch: pytest.MonkeyPatch, cached: Path) -> None:
    java = check_java()
    assert shared_classes(java) == shared_classes(f"Picked up JAVA_TOOL_OPTIONS: -Dx=1\n{java}") == cached
    assert shared_classes("another Java") is None
    monkeypatch.setenv("SPARK_HOME", "/opt/another")
    assert classes_file(java) != cached


@pytest.mark.parametrize("mode", ["file", "folder"])
def test_it_is_not_used_if_others_can_change_it(
    mode: str, cached: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its classes are run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "tmc" / cached.name
    path.parent.mkdir(mode=0o755)
    path.write_bytes(b"")
    assert shared_classes(check_java()) == path
    (path if mode == "file" else path.parent).chmod(0o777)
    assert shared_classes(check_java()) is None


@pytest.mark.parametrize("folder", ["relative", "/with:colon", '/with"quote'])
def test_a_folder_that_java_would_not_understand(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert classes_file(check_java()) is None
    with pytest.raises(CannotRun, match="set XDG_CACHE_HOME, here and for the jobs, to an absolute path"):
        NewClasses(check_java())


def test_a_damaged_file_is_named(config: Path, cached: Path, tmp_path: Path) -> None:
    path = tmp_path / "tmc" / cached.name
    path.parent.mkdir(mode=0o755)
    path.write_bytes(cached.read_bytes()[: 1 << 20])
    said = refusal(run(tmp_path, "archive", "--config", str(config), XDG_CACHE_HOME=str(tmp_path)))
    assert f"Java did not start: delete {path}, it may be damaged, and run share-classes again." in said


@pytest.mark.takes_turns("spark")
def test_java_says_why_it_makes_none(config: Path, tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text("")
    environment = {"XDG_CACHE_HOME": str(tmp_path), "SPARK_CONF_DIR": str(conf)}
    said = refusal(run(tmp_path, "share-classes", "--config", str(config), **environment))
    assert "non-empty directory" in said
    assert not list(tmp_path.glob("tmc/*"))


def test_it_is_not_for_spark_submit(config: Path, tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PYSPARK_GATEWAY_PORT": "1"}
    said = refusal(run(tmp_path, "share-classes", "--config", str(config), **environment))
    assert "run this command without it" in said


def test_a_folder_that_cannot_be_written(config: Path, tmp_path: Path) -> None:
    (tmp_path / "tmc").write_text("a file")
    said = refusal(run(tmp_path, "share-classes", "--config", str(config), XDG_CACHE_HOME=str(tmp_path)))
    assert "/tmc cannot be written: File exists. Set XDG_CACHE_HOME, here and for the jobs." in said


def test_a_run_that_is_killed_leaves_no_file(config: Path, tmp_path: Path) -> None:
    """Java would crash on a file that is not whole."""
    process = _started("share-classes", config, tmp_path)
    while not list(tmp_path.glob("tmc/*/classes.jsa")):  # it is there for a moment only, so no growing pauses
        assert process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    assert not list(tmp_path.glob("tmc/*.jsa"))
