"""The producer's side of checks: answers from the ledger or from functions of your own, over gRPC or HTTP.

    checks = center.checks(engine)
    checks.serve("10.0.0.5:50061")               # a separate gRPC server; or inside a web application:
    app.mount("/tmc", checks.asgi())             # FastAPI, Starlette
    app.wsgi_app = checks.beside(app.wsgi_app)   # Flask, Django, any WSGI application

Callers must present the app's check token, which the center gives to this app only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tmc_client.checks.questions import Answer, Denied, Question, Verdict
from tmc_client.checks.token import CheckToken

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tmc_client.checks.grpc_server import ChecksServer
    from tmc_client.checks.running import RunningServers
    from tmc_client.connection import Connection
    from tmc_client.local.engines import Source

log = logging.getLogger("tmc_client.checks")

Outcome = Callable[[Question], Verdict]


class Checks:
    """Answers for one app.

    engine: of the database with its ledger, or a function that returns a new connection of a driver; without it, only
    your own functions answer.

    running: where the servers that `serve` starts are kept until they stop.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Source | AsyncEngine | None,
        outcomes: Mapping[str, Outcome],
        running: RunningServers,
    ) -> None:
        self.connection = connection
        self.running = running
        self.token = CheckToken(connection)
        self._outcomes = outcomes
        self._ledger: Any = None
        if engine is not None:
            from sqlalchemy import Engine

            from tmc_client.checks.fence import LedgerAnswers
            from tmc_client.local.engines import engine_of

            if isinstance(engine, Engine) or callable(engine):
                self._ledger = LedgerAnswers(engine_of(engine, "center.checks()", pooled=True))
            else:
                from tmc_client.checks.aio_fence import AsyncLedgerAnswers

                self._ledger = AsyncLedgerAnswers(engine)

    def demand(self, token: str) -> None:
        """Verify the caller's token. Servers call this before they read or parse anything.

        Raises Denied; Unavailable: the center did not tell the token yet.
        """
        if not self.token.is_right(token):
            raise Denied

    def answer(self, token: str, questions: Sequence[Question], *, fences: bool = True) -> list[Answer]:
        """One answer per question. token: as presented by the caller.  fences: whether to fence missing messages.

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
            return Answer.not_now("NOBODY: no ledger and no function answers for this topic.")
        try:
            verdict = outcome(question)
        except Exception as exc:
            log.exception("the function for topic %s failed", question.topic)
            return Answer.not_now(f"FAILED: {exc!r}"[:500])
        if not isinstance(verdict, Verdict):
            log.error("the function for topic %s returned %r instead of a tmc.Verdict", question.topic, verdict)
            return Answer.not_now(f"NO_VERDICT: the function returned {type(verdict).__name__}.")
        return Answer(verdict, "The producer's own function said so.")

    def serve(self, address: str = "127.0.0.1:0", **options: Any) -> ChecksServer:
        """A gRPC server for checks in threads of its own. See ChecksServer."""
        from tmc_client.checks.grpc_server import ChecksServer

        server = ChecksServer(self, address, **options)
        server.start()
        return server

    def servicer(self) -> Any:
        """For a gRPC server that you have: check_pb2_grpc.add_CheckServiceServicer_to_server(checks.servicer(), server)."""
        from tmc_client.checks.grpc_server import CheckServicer

        return CheckServicer(self)

    def asgi(self) -> Any:
        """An ASGI application: mount it where the topic's target points to."""
        from tmc_client.checks.web import AsgiChecks

        return AsgiChecks(self)

    def wsgi(self) -> Any:
        """A WSGI application."""
        from tmc_client.checks.web import WsgiChecks

        return WsgiChecks(self)

    def beside(self, application: Any, path: str = "/tmc/checks") -> Any:
        """A WSGI application that answers checks at `path` and leaves everything else to yours."""
        from tmc_client.checks.web import Beside

        return Beside(application, self.wsgi(), path)

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
