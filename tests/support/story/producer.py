"""A producer that stays alive and repeats every call until it is answered.

usage: producer.py ADDRESS KEY NAME COUNT THREADS FOLDER

Every tenth order is rolled back. Ends after COUNT orders, or when FOLDER/enough exists; writes NAME.committed at its end.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path

import tmc_client as tmc

TOPICS = ("story.urgent", "story.bulk", "story.a", "story.b")


def insist(call):
    """Until answered: the same attempt, the same ids."""
    while True:
        try:
            return call()
        except tmc.Unavailable:
            continue


def order(center: tmc.Center, name: str, number: int) -> str | None:
    """Prepare, the local transaction, submit or roll back. Returns: the key, when it was submitted."""
    key, attempt = f"{name}-{number}-{TOPICS[number % 4]}", tmc.new_attempt_id()
    topic = TOPICS[number % 4]
    limit = timedelta(seconds=10)
    prepared = insist(lambda: center.prepare(topic, {"order": key}, key=key, attempt_id=attempt, timeout=limit))
    if number % 10 == 9:
        insist(lambda: center.rollback(prepared, timeout=limit))
        return None
    insist(lambda: center.submit(prepared, timeout=limit))
    return key


def main(address: str, key: str, name: str, count: str, threads: str, folder: str) -> None:
    center = tmc.connect(address, app="orders", key=key)
    committed: list[str] = []
    numbers = iter(range(int(count)))
    lock = threading.Lock()
    enough = Path(folder) / "enough"

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None or enough.exists():
                return
            made = order(center, name, number)
            if made is not None:
                committed.append(made)

    workers = [threading.Thread(target=work) for _ in range(int(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with open(f"{folder}/{name}.committed", "w") as file:
        file.write("\n".join(committed))
    center.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
