"""The producer's side of checks: answers from the ledger or from functions of your own, over gRPC or HTTP.

    checks = center.checks(engine)               # or several; checks.add(engine) for those that come later
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
from tmc_client.extras import needed_by

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tmc_client.checks.grpc_server import ChecksServer
    from tmc_client.checks.ledgers import Ledgers
    from tmc_client.checks.running import RunningServers
    from tmc_client.connecting.connection import Caller
    from tmc_client.local.engines import Source

log = logging.getLogger("tmc_client.checks")

Outcome = Callable[[Question], Verdict]


class Checks:
    """Answers for one app.

    engines: of the databases with its ledgers, or functions that return a new connection of a driver; without one, only
    your own functions answer.
    running: where the servers that `serve` starts are kept until they stop.
    """

    def __init__(
        self,
        connection: Caller,
        engines: Sequence[Source | AsyncEngine],
        outcomes: Mapping[str, Outcome],
        running: RunningServers,
    ) -> None:
        self.connection = connection
        self.running = running
        self.token: CheckToken = CheckToken(connection)
        self._outcomes = outcomes
        self._ledgers: Ledgers | None = None
        self._has_said = False
        for engine in engines:
            self.add(engine)

    def add(self, engine: Source | AsyncEngine) -> None:
        """Answer from this ledger, too, e.g. that of a new tenant. Raises InvalidRequest: it is no engine."""
        with needed_by("center.checks(engine)"):
            from tmc_client.checks.ledgers import Ledgers

        if self._ledgers is None:
            self._ledgers = Ledgers()
        self._ledgers.add(engine)

    def announce(self, address: str = "") -> bool:
        """Tell the center that checks are answered at `address`, and from which ledger, if it is one. False: try again.

        "": at the address that connect() was given.
        """
        ledger_id = self._which()
        self.connection.announce(address, ledger_id or b"")
        return self.token.learn(address, ledger_id or b"") and ledger_id is not None

    def _which(self) -> bytes | None:
        """The id of the only ledger; b"": there is none, or several; None: it cannot be read now."""
        if self._ledgers is None:
            return b""
        try:
            found = self._ledgers.only_id()
        except Exception as exc:  # drivers of asyncio raise errors of their own when they cannot connect
            log.warning("the center will learn later which ledger: %s", getattr(exc, "orig", exc), exc_info=True)
            return None
        self._has_said = True
        return found

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
        # Of a topic with a function, blocks still leave the truth in their ledger, and only the ledger can fence.
        of_ledger = [(i, q) for i, q in enumerate(questions) if q.ledger_id or q.topic not in self._outcomes]
        if of_ledger and self._ledgers is not None:
            found = self._ledgers.answer([question for _, question in of_ledger], fences=fences)
            if not self._has_said:  # over HTTP: its calls say from now on which ledger it has
                self.connection.announce("", self._which() or b"")
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
        """Make a servicer for a gRPC server that you have:
        check_pb2_grpc.add_CheckServiceServicer_to_server(checks.servicer(), server).
        """
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
        if self._ledgers is not None:
            self._ledgers.close()
