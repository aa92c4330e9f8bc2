"""The producer's side of checks: answers from the ledger or from functions of your own, behind any door.

    checks = center.checks(engine)
    checks.serve("10.0.0.5:50061")               # a gRPC server of its own; or one of the doors of a web application:
    app.mount("/tmc", checks.asgi())             # FastAPI, Starlette
    app.wsgi_app = checks.beside(app.wsgi_app)   # Flask, Django, any WSGI application

Whoever asks has to show the app's check token, which the center tells this app alone.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tmc_client import errors
from tmc_client.connection import watch_forks
from tmc_client.questions import Answer, Denied, Question, Verdict
from tmc_common.protocol import message_pb2

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tmc_client.center import Center
    from tmc_client.checks_server import ChecksServer

log = logging.getLogger("tmc_client.checking")

Outcome = Callable[[Question], Verdict]
_METHOD = "/tmc.v1.MessageService/DescribeChecks"
_ASK_AGAIN_S = 5.0
_PREVIOUS_S = 60.0  # servers of the center hear of a rotation one after the other


class CheckToken:
    """What this app's checks carry, asked of the center at first use, and again when another one comes.

    After a rotation the previous one is right for another minute.
    """

    def __init__(self, center: Center, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._center = center
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._token = ""
        self._previous = ("", 0.0)
        self._asked = float("-inf")
        watch_forks(self)

    def after_fork(self) -> None:
        """See connection.ForkAware."""
        self._lock = threading.Lock()

    def is_right(self, shown: str) -> bool:
        """Compare in constant time. Raises TmcError: it is not known yet, and the center does not say.

        Whoever shows a wrong one waits for the center at most every five seconds: strangers cannot keep our threads.
        """
        if self._matches(shown):
            return True
        if self._token and (self._monotonic() - self._asked < _ASK_AGAIN_S or self._lock.locked()):
            return False
        with self._lock:
            if self._monotonic() - self._asked >= _ASK_AGAIN_S:
                self._keep(self._ask())
        return self._matches(shown)

    def _matches(self, shown: str) -> bool:
        previous, until = self._previous
        right = [self._token, previous if self._monotonic() < until else ""]
        found = [hmac.compare_digest(shown.encode(errors="replace"), token.encode()) for token in right if token]
        return any(found)

    def _keep(self, token: str) -> None:
        """Under the lock."""
        if self._token and token != self._token:
            self._previous = (self._token, self._monotonic() + _PREVIOUS_S)
        self._token, self._asked = token, self._monotonic()

    def learn(self) -> bool:
        """Ask the center, which also tells it where we answer. Returns: it said."""
        try:
            token = self._ask()
        except errors.TmcError as exc:
            log.info("the center is told later where checks are answered: %s", exc)
            return False
        with self._lock:
            self._keep(token)
        return True

    def _ask(self) -> str:
        import grpc

        from tmc_client import wire

        try:
            method = self._center.connection.unary(_METHOD, message_pb2.DescribeChecksResponse)
            found: str = method(message_pb2.DescribeChecksRequest(), timeout=2.0).check_token
        except grpc.RpcError as exc:
            raise wire.from_rpc(exc) from exc
        return found


class Checks:
    """Answers for one app. engine: of the database with its ledger; without one only your own functions answer."""

    def __init__(self, center: Center, engine: Engine | AsyncEngine | None, outcomes: Mapping[str, Outcome]) -> None:
        self.center = center
        self.token = CheckToken(center)
        self._outcomes = outcomes
        self._ledger: Any = None
        if engine is not None:
            from sqlalchemy import Engine

            from tmc_client.fence import LedgerAnswers

            if isinstance(engine, Engine):
                self._ledger = LedgerAnswers(engine)
            else:
                from tmc_client.aio_checking import AsyncLedgerAnswers

                self._ledger = AsyncLedgerAnswers(engine)

    def demand(self, token: str) -> None:
        """Turn strangers away. Doors call it before they read or parse anything.

        Raises Denied; Unavailable: the center did not tell the token yet.
        """
        if not self.token.is_right(token):
            raise Denied

    def answer(self, token: str, questions: Sequence[Question], *, fences: bool = True) -> list[Answer]:
        """One answer per question. token: what the caller showed.  fences: markers may be written for absent messages.

        Raises Denied; Unavailable: the center did not tell the token yet.
        """
        self.demand(token)
        answers: dict[int, Answer] = {}
        of_ledger = [(i, q) for i, q in enumerate(questions) if q.topic not in self._outcomes]
        if of_ledger and self._ledger is not None:
            found = self._ledger.answer([question for _, question in of_ledger], fences=fences)
            answers = {index: answer for (index, _), answer in zip(of_ledger, found, strict=True)}
        return [answers.get(index) or self._outcome(question) for index, question in enumerate(questions)]

    def _outcome(self, question: Question) -> Answer:
        outcome = self._outcomes.get(question.topic)
        if outcome is None:
            return Answer(Verdict.UNKNOWN, "NOBODY: no ledger and no function answers for this topic.")
        try:
            verdict = outcome(question)
        except Exception as exc:
            log.exception("the function for topic %s failed", question.topic)
            return Answer(Verdict.UNKNOWN, f"FAILED: {exc!r}"[:500])
        if not isinstance(verdict, Verdict):
            log.error("the function for topic %s returned %r instead of a tmc.Verdict", question.topic, verdict)
            return Answer(Verdict.UNKNOWN, f"NO_VERDICT: the function returned {type(verdict).__name__}.")
        return Answer(verdict, "The producer's own function said so.")

    def serve(self, address: str = "127.0.0.1:0", **options: Any) -> ChecksServer:
        """A gRPC server for checks in threads of its own. See ChecksServer."""
        from tmc_client.checks_server import ChecksServer

        server = ChecksServer(self, address, **options)
        server.start()
        return server

    def servicer(self) -> Any:
        """For a gRPC server that you have: check_pb2_grpc.add_CheckServiceServicer_to_server(checks.servicer(), server)."""
        from tmc_client.checks_server import CheckServicer

        return CheckServicer(self)

    def asgi(self) -> Any:
        """An ASGI application: mount it where the topic's target points to."""
        from tmc_client.checks_web import AsgiChecks

        return AsgiChecks(self)

    def wsgi(self) -> Any:
        """A WSGI application."""
        from tmc_client.checks_web import WsgiChecks

        return WsgiChecks(self)

    def beside(self, application: Any, path: str = "/tmc/checks") -> Any:
        """A WSGI application that answers checks at `path` and leaves everything else to yours."""
        from tmc_client.checks_web import Beside

        return Beside(application, self.wsgi(), path)

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
