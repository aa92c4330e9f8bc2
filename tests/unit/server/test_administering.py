"""What operators ask for: a change that is awaited holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from tmc_server.errors import StoreUnavailable
from tmc_server.requests.administering import Administering


class _Activation:
    """domain.ports.catalog.Activation that waits until it is stopped."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.threads: set[str] = set()

    def wait(self) -> int:
        self.threads.add(threading.current_thread().name)
        self._stopped.wait()
        raise StoreUnavailable

    def stop(self) -> None:
        self._stopped.set()


def _administering(activation: _Activation, reader: Mock) -> Administering:
    return Administering(
        editor=Mock(),
        catalog=Mock(),
        reader=reader,
        refresh=Mock(),
        activation=activation,
        instances=Mock(),
        forwarding=Mock(),
    )


def test_changes_that_are_awaited_hold_up_no_read_and_end_with_the_server() -> None:
    activation, reader = _Activation(), Mock()
    reader.servers.return_value = []

    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        administering = _administering(activation, reader)
        stored = asyncio.Semaphore(0)
        changes = [
            asyncio.create_task(administering.change(lambda: loop.call_soon_threadsafe(stored.release)))
            for _ in range(20)
        ]
        try:
            async with asyncio.timeout(30):  # hangs without threads of their own
                for _ in changes:
                    await stored.acquire()
                assert await administering.servers() == []
        finally:
            administering.stop()
        return await asyncio.gather(*changes, return_exceptions=True)

    outcomes = asyncio.run(main())
    assert {type(outcome) for outcome in outcomes} <= {StoreUnavailable, asyncio.CancelledError}
    assert activation.threads
    assert all(name.startswith("tmc-activation") for name in activation.threads)


def test_a_change_that_is_stored_while_the_server_stops_is_to_be_repeated() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        administering = _administering(_Activation(), Mock())
        await administering.change(lambda: loop.call_soon_threadsafe(administering.stop))

    with pytest.raises(StoreUnavailable, match="repeat it"):
        asyncio.run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_stopping_needs_no_change_before_and_may_be_repeated(times: int) -> None:
    administering = _administering(_Activation(), Mock())
    for _ in range(times):
        administering.stop()
