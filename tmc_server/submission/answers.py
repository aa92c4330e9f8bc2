"""Answers to producers: the JSON form of what the RPC would have answered; docs/submit-queues.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf import json_format

from tmc_server.domain.operations import Stored
from tmc_server.errors import CredentialsInvalid, TmcError
from tmc_server.rpc.status import item_error
from tmc_server.submission.intake import Described, Intake, Outcome
from tmc_server.submission.letters import Letter, Place, may_reply_to

REASON, SENTENCE = "tmc-reason", "tmc-error"
"""Headers of a letter in the queue of what was refused."""
JSON = "application/json"
_SENTENCE_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class Settled:
    """A letter that is done, for its reader. reply: what to send to its `reply_to`; b"": nothing.

    refusal: why it goes to the queue of what was refused, if the reply reaches nobody, or there is none; None: it was taken.
    """

    letter: Letter
    reply: bytes
    refusal: TmcError | None

    @property
    def notes(self) -> dict[str, str]:
        """Return the headers that say why it was refused."""
        assert self.refusal is not None
        return {REASON: self.refusal.reason, SENTENCE: self.refusal.sentence[:_SENTENCE_CHARACTERS]}


OpenIntake = Callable[[Place, Callable[[Sequence[Settled]], None]], Intake]
"""Makes the intake of a queue or partition. Its second argument is called on the loop with what is done."""


def settled(app: str, done: Sequence[tuple[Letter, Outcome]]) -> list[Settled]:
    """app: whose queue it is. Who cannot sign gets no answers."""
    return [
        Settled(
            letter=letter,
            reply=_body(outcome) if _wants_reply(letter, app, outcome) else b"",
            refusal=outcome if isinstance(outcome, TmcError) else None,
        )
        for letter, outcome in done
    ]


def _wants_reply(letter: Letter, app: str, outcome: Outcome) -> bool:
    return bool(letter.reply_to) and may_reply_to(letter.reply_to, app) and not isinstance(outcome, CredentialsInvalid)


def _body(outcome: Outcome) -> bytes:
    if isinstance(outcome, Stored):
        message_id = str(outcome.message_id) if outcome.message_id is not None else ""
        found: object = {"messageId": message_id, "state": f"MESSAGE_STATE_{outcome.state.name}"}
    elif isinstance(outcome, Described):
        found = {"checkToken": outcome.check_token}
    else:
        assert isinstance(outcome, TmcError)
        found = {"error": json_format.MessageToDict(item_error(outcome))}
    return json.dumps(found).encode()
