"""The quickstart script and the programs printed in the docs do what the docs say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import order_service
from tmc_storm.eventually import eventually
from tmc_storm.services.ports import free_port

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
        eventually(lambda: _tmc(address, "list-subscriptions").count('"coupons"') == 1)
        for _ in range(3):
            subprocess.run([sys.executable, "orders.py"], cwd=folder, check=True, timeout=30)
        eventually(lambda: (folder / "coupons.log").read_text().count("coupon for order") == 3)
        shown = _tmc(address, "get-message", "--topic", "order.paid", "--key", "paid-1")
        assert json.loads(shown)["message"]["body_text"] == '{"order":1}'
        assert _tmc(address, "list-messages", "order.paid").count("COMMITTED") == 3
    finally:
        for process in (consumer, center):
            process.terminate()
            process.wait(20)
        log.close()


def test_the_program_of_the_outbox_page(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "outbox.md").read_text(), re.S)[1]
    port = free_port()
    (tmp_path / "shop.py").write_text(program.replace("50051", str(port)))
    center = subprocess.Popen([TMC, "dev", "--port", str(port)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, check=True, timeout=60)
        eventually(lambda: "COMMITTED" in _tmc(f"127.0.0.1:{port}", "list-messages", "order.paid"))
    finally:
        center.terminate()
        center.wait(20)


def _tmc(address: str, *arguments: str) -> str:
    command = [TMC, "admin", "--address", address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def test_the_operators_lines_of_the_page_about_checks(tmp_path: Path) -> None:
    """A foreign service, a message that nobody knows about, and every command that docs/checks.md shows operators."""
    port, center_port = free_port(), free_port()
    service = order_service.serve(port)
    address = f"127.0.0.1:{center_port}"
    center = subprocess.Popen([TMC, "dev", "--port", str(center_port)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        producer = (
            "import tmc_client as tmc; center = tmc.connect({0!r}, app='orders');"
            " print(center.prepare('order.paid', {{}}, key={1!r}).message_id)"
        )

        def prepared(key: str) -> str:
            line = [sys.executable, "-c", producer.format(address, key)]
            return subprocess.run(line, capture_output=True, text=True, timeout=30).stdout.strip()

        eventually(lambda: prepared("o-1"))
        options = re.search(r"--kind reflection (.*)", (ROOT / "docs" / "checks.md").read_text())
        assert options is not None
        arguments = shlex.split(options[1])
        line = ["set-check", "order.paid", "--kind", "reflection", "--address", f"127.0.0.1:{port}", *arguments]
        assert '"kind": "reflection"' in _tmc(address, *line, "--max-retry", "0")
        assert "ORDER_STATUS_PAID" in _tmc(address, "get-check", "order.paid")
        now = json.loads(_tmc(address, "check-now", prepared("o-3")))
        assert (now["verdict"], now["state"]) == ("VERDICT_COMMIT", "MESSAGE_STATE_COMMITTED")
        assert now["request"] == 'shop.v1.OrderService/GetOrder {"order_id": "o-3"}'
        unknown = prepared("open")
        assert json.loads(_tmc(address, "check-now", unknown))["reason"] == "NOT_UNDERSTOOD"
        why = ["--reason", "producer mended"]
        assert '"matched"' not in _tmc(address, "reactivate-checks", "order.paid", "--dry-run", *why)
        assert "ROLLED_BACK" in _tmc(address, "decide", unknown, "ROLLBACK", "--reason", "seen in the books")
        assert not _tmc(address, "list-messages", "order.paid", "--state", "check_failed")
    finally:
        service.stop(0)
        center.terminate()
        center.wait(20)
