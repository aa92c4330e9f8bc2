"""The quickstart script and the programs printed in the docs do what the docs say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.mariadb import free_port

ROOT = Path(__file__).parents[2]
TMC = str(Path(sys.executable).parent / "tmc")


def test_the_quickstart_agrees_and_says_so() -> None:
    run = ROOT / "examples" / "quickstart" / "run.py"
    done = subprocess.run([sys.executable, str(run)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    line = r"paid (\d+), submitted \1, rolled back or never prepared \d+, coupons \1, lost 0, invented 0, doubled 0"
    assert re.search(line, done.stdout)
    assert "the two databases agree" in done.stdout
    assert done.stdout.count("killed the") == 5


@pytest.fixture
def programs(tmp_path: Path) -> tuple[Path, str]:
    """The two programs of docs/quickstart.md in a folder of their own, against a port of our own."""
    consumer, producer = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.S)
    address = f"127.0.0.1:{free_port()}"
    for name, text in (("coupons.py", consumer), ("orders.py", producer)):
        (tmp_path / name).write_text(text.replace("127.0.0.1:50051", address))
    return tmp_path, address


def test_the_programs_of_the_quickstart_page(programs: tuple[Path, str]) -> None:
    folder, address = programs
    log = (folder / "coupons.log").open("w")
    center = subprocess.Popen([TMC, "dev", "--port", address.rpartition(":")[2]], cwd=folder, stderr=subprocess.DEVNULL)
    consumer = subprocess.Popen([sys.executable, "-u", "coupons.py"], cwd=folder, stdout=log)
    try:
        eventually(lambda: _tmc(address, "list-subscriptions").count('"coupons"') == 1, seconds=30)
        for _ in range(3):
            subprocess.run([sys.executable, "orders.py"], cwd=folder, check=True, timeout=30)
        eventually(lambda: (folder / "coupons.log").read_text().count("coupon for order") == 3)
        shown = _tmc(address, "get-message", "--topic", "order.paid", "--key", "paid-1")
        assert json.loads(shown)["message"]["body_text"] == '{"order":1}'
        assert _tmc(address, "list-messages", "order.paid").count('"key"') == 3
    finally:
        for process in (consumer, center):
            process.terminate()
            process.wait(20)
        log.close()


def _tmc(address: str, *arguments: str) -> str:
    command = [TMC, "admin", "--address", address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
