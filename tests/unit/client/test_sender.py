"""The sender thread: coalescing, repeats, deadlines, forks. The center is a function."""

from __future__ import annotations

import threading
from concurrent.futures import wait as wait_all
from typing import Any

import grpc
import pytest

from tmc_client import errors
from tmc_client.connecting import sender
from tmc_client.connecting.sender import ACK, EXTEND, ROLLBACK, SUBMIT, Sender
from tmc_common.protocol import consumption_pb2, message_pb2, types_pb2


class _Refused(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "scripted"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class ScriptedCenter:
    """Answers batch calls; `gate` holds them back, `script` says what the next ones do."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[str]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.script: list[Any] = []
        self.held = ""  # a method that is not answered before `gate` opens; "": all

    def unary(self, path: str, response_class: Any) -> Any:
        def call(request: Any, timeout: float, metadata: Any) -> Any:
            assert timeout > 0
            self.batches.append((path.rpartition("/")[2], [item.message_id for item in request.items]))
            self.entered.set()
            assert self.held not in path or self.gate.wait(20)
            step = self.script.pop(0) if self.script else None
            if isinstance(step, Exception):
                raise step
            response = response_class()
            for item in request.items:
                result = response.results.add()
                if "message_id" in result.DESCRIPTOR.fields_by_name:
                    result.message_id = item.message_id
                if isinstance(step, types_pb2.ItemError) and item.message_id == "bad":
                    result.ClearField("message_id")
                    result.error.CopyFrom(step)
            return response

        return call


def _submit(message_id: str) -> message_pb2.SubmitRequest:
    return message_pb2.SubmitRequest(message_id=message_id)


def test_what_waits_while_a_call_is_in_flight_goes_together() -> None:
    center = ScriptedCenter()
    made = Sender(center)  # type: ignore[arg-type]
    center.gate.clear()
    futures = [made.send(SUBMIT, _submit("0"), 10)]
    assert center.entered.wait(5)
    futures += [made.send(SUBMIT, _submit(str(i)), 10) for i in range(1, 50)]
    futures += [made.send(ROLLBACK, message_pb2.RollbackRequest(message_id=str(i)), 10) for i in range(3)]
    center.gate.set()
    wait_all(futures, 10)
    assert [future.result().message_id for future in futures[:50]] == [str(i) for i in range(50)]
    assert [(method, len(ids)) for method, ids in center.batches] == [
        ("SubmitMany", 1),
        ("SubmitMany", 49),
        ("RollbackMany", 3),
    ]
    made.close()


def test_acks_and_extends_do_not_wait_behind_a_producers_call() -> None:
    center = ScriptedCenter()
    center.gate.clear()
    center.held = "SubmitMany"
    made = Sender(center)  # type: ignore[arg-type]
    stuck = made.send(SUBMIT, _submit("0"), 30)
    assert center.entered.wait(20)
    ack = made.send(ACK, consumption_pb2.AckRequest(message_id="1", attempt=1), 30)
    extend = made.send(EXTEND, consumption_pb2.ExtendRequest(message_id="2", attempt=1, extend_ms=1000), 30)
    wait_all([ack, extend], 20)
    assert ack.done()
    assert extend.done()
    assert not stuck.done()
    assert not made.flush(0)
    center.gate.set()
    assert stuck.result(20).message_id == "0"
    assert made.flush(20)
    made.close()


def test_an_unavailable_center_is_asked_again_with_the_same_items() -> None:
    center = ScriptedCenter()
    center.script = [_Refused(grpc.StatusCode.UNAVAILABLE), _Refused(grpc.StatusCode.UNAVAILABLE)]
    made = Sender(center)  # type: ignore[arg-type]
    assert made.send(SUBMIT, _submit("x"), 20).result(20).message_id == "x"
    assert center.batches == [("SubmitMany", ["x"])] * 3
    made.close()


@pytest.mark.parametrize("reason", [*map(types_pb2.Reason.Value, sorted(sender._REPEATED_REASONS)), 999])
def test_a_transient_item_error_repeats_that_item_alone(reason: Any) -> None:
    """999: only a newer center knows it; its status says that it is transient."""
    center = ScriptedCenter()
    center.gate.clear()
    made = Sender(center)  # type: ignore[arg-type]
    first = made.send(SUBMIT, _submit("first"), 20)
    assert center.entered.wait(5)
    futures = [made.send(SUBMIT, _submit(name), 20) for name in ("a", "bad", "b")]
    center.script = [None, types_pb2.ItemError(code=14, reason=reason, message="later")]
    center.gate.set()
    assert [future.result(20).message_id for future in (first, *futures)] == ["first", "a", "bad", "b"]
    assert center.batches[1:] == [("SubmitMany", ["a", "bad", "b"]), ("SubmitMany", ["bad"])]
    made.close()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("KEY_IN_PROGRESS", errors.KeyInProgress),
        ("FIELD_INVALID", errors.InvalidRequest),
        ("OPEN_LIMIT", errors.Overloaded),
        ("INTERNAL_FAULT", errors.CenterFault),
    ],
)
def test_a_final_item_error_reaches_its_caller_only(reason: str, kind: type[errors.TmcError]) -> None:
    center = ScriptedCenter()
    center.script = [types_pb2.ItemError(code=3, reason=types_pb2.Reason.Value(reason), message="no", field="key")]
    made = Sender(center)  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        made.send(SUBMIT, _submit("bad"), 10).result(10)
    assert (caught.value.reason, caught.value.field, str(caught.value)) == (reason, "key", "no")
    made.close()


def test_a_deadline_ends_the_repeats() -> None:
    center = ScriptedCenter()
    center.script = [_Refused(grpc.StatusCode.UNAVAILABLE)] * 1000
    made = Sender(center)  # type: ignore[arg-type]
    with pytest.raises(errors.DeadlineExceeded):
        made.send(SUBMIT, _submit("x"), 0.2).result(10)
    made.close()


def test_a_fault_of_the_sdk_leaves_nobody_waiting() -> None:
    center = ScriptedCenter()
    center.script = [ValueError("boom")]
    made = Sender(center)  # type: ignore[arg-type]
    with pytest.raises(errors.CenterFault):
        made.send(SUBMIT, _submit("x"), 5).result(10)
    assert made.send(SUBMIT, _submit("y"), 5).result(10).message_id == "y"
    made.close()


def test_cancelled_futures_are_skipped() -> None:
    center = ScriptedCenter()
    center.gate.clear()
    made = Sender(center)  # type: ignore[arg-type]
    first = made.send(SUBMIT, _submit("0"), 10)
    assert center.entered.wait(5)
    gone, stays = made.send(SUBMIT, _submit("gone"), 10), made.send(SUBMIT, _submit("stays"), 10)
    assert gone.cancel()
    center.gate.set()
    assert first.result(5)
    assert stays.result(5).message_id == "stays"
    assert center.batches[1] == ("SubmitMany", ["stays"])
    made.close()


def test_close_finishes_what_is_queued_and_refuses_the_rest() -> None:
    center = ScriptedCenter()
    made = Sender(center)  # type: ignore[arg-type]
    futures = [made.send(SUBMIT, _submit(str(i)), 5) for i in range(20)]
    made.close()
    assert all(future.done() for future in futures)
    with pytest.raises(errors.Unavailable):
        made.send(SUBMIT, _submit("late"), 5)


class _TooLarge(_Refused):
    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_a_large_item_travels_alone() -> None:
    center = ScriptedCenter()
    center.gate.clear()
    made = Sender(center)  # type: ignore[arg-type]
    futures = [made.send(SUBMIT, _submit("first"), 20)]
    assert center.entered.wait(5)
    futures += [made.send(SUBMIT, _submit(name), 20) for name in ("a", "x" * (2 << 20), "b")]
    center.gate.set()
    wait_all(futures, 20)
    assert [len(ids) for _, ids in center.batches] == [1, 1, 1, 1]


def test_what_the_transport_finds_too_large_fails_alone() -> None:
    center = ScriptedCenter()
    center.gate.clear()
    made = Sender(center)  # type: ignore[arg-type]
    first = made.send(SUBMIT, _submit("first"), 20)
    assert center.entered.wait(5)
    futures = [made.send(SUBMIT, _submit(name), 20) for name in ("a", "b", "c", "d")]
    center.script = [None, _TooLarge(), _TooLarge(), None, _TooLarge(), None]  # abcd, ab, a, b, cd... and so on
    center.gate.set()
    assert first.result(5)
    wait_all(futures, 20)
    assert [future.exception() is None for future in futures] == [True, False, True, True]
    made.close()


def test_a_long_deadline_does_not_hold_the_thread_for_as_long() -> None:
    center, timeouts = ScriptedCenter(), []
    real = center.unary
    center.unary = lambda path, response: (
        lambda request, timeout, metadata: (  # type: ignore[method-assign]
            timeouts.append(timeout) or real(path, response)(request, timeout, metadata)
        )
    )
    made = Sender(center)  # type: ignore[arg-type]
    made.send(SUBMIT, _submit("x"), 120).result(10)
    assert timeouts == [sender._CALL_S]
    made.close()


def test_callers_that_were_answered_together_ask_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    center, again, futures = ScriptedCenter(), ["b", "c", "d"], []
    calls = Sender(center)  # type: ignore[arg-type]

    def give_way(_seconds: float) -> None:  # in each turn one of the callers gets to ask again
        if center.batches and again:
            futures.append(calls.send(SUBMIT, _submit(again.pop(0)), 30))

    monkeypatch.setattr(sender.time, "sleep", give_way)
    calls.send(SUBMIT, _submit("a"), 30).result(20)
    calls.close()
    assert [future.result(20).message_id for future in futures] == ["b", "c", "d"]
    assert [ids for _, ids in center.batches] == [["a"], ["b", "c", "d"]]
