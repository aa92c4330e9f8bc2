"""What an operator may do: the role by the method, the topics by what the request names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tmc_server.domain.catalog import Catalog
from tmc_server.domain.checks import CheckTarget
from tmc_server.domain.ids import MessageId
from tmc_server.domain.operators import Operator, Role
from tmc_server.domain.rights import Right, Scope
from tmc_server.errors import RoleRequired, TopicNotAllowed
from tmc_server.rpc.convert import topic_name


def demand_role(operator: Operator, role: Role) -> None:
    """Raises RoleRequired."""
    if operator.role < role:
        raise RoleRequired(
            f"This takes the role {role.name.lower()}, and {operator.name} has the role {operator.role.name.lower()}: "
            "ask an administrator of the center."
        )


def demand_topics(operator: Operator, right: Right, request: Any, catalog: Catalog) -> None:
    """The request stays within the operator's topics. Raises TopicNotAllowed."""
    named = _NAMED.get(right.scope)
    if named is None or not operator.is_limited:
        return
    topics = list(named(request, catalog))
    if not topics:
        raise TopicNotAllowed(
            f"This concerns more than the topics that {operator.name} has rights for: name one that begins with "
            f"{_in_words(operator)}, or ask an administrator of the center."
        )
    for topic in topics:
        demand_topic(operator, topic)


def demand_topic(operator: Operator, topic: str) -> None:
    """Raises TopicNotAllowed. It does not say which topic: a message id or a job alone would lead to its name."""
    if not operator.covers(topic):
        raise TopicNotAllowed(
            f"{operator.name} has rights for topics that begin with {_in_words(operator)}, and this is about another one: "
            "ask an administrator of the center."
        )


def demand_owner(operator: Operator, owner: str, catalog: Catalog) -> None:
    """Refuse an owner without a topic of this operator's: its check token would be in reach. Raises TopicNotAllowed."""
    owners = {catalog.apps[topic.owner].id for topic in catalog.topics.values() if operator.covers(topic.name)}
    if operator.is_limited and owner and owner not in owners:
        raise TopicNotAllowed(
            f"{operator.name} registers topics only for apps that own a topic that begins with {_in_words(operator)}: ask an "
            "administrator of the center for the first one."
        )


def demand_own_addresses(operator: Operator, targets: Sequence[CheckTarget]) -> None:
    """An address gets the app's check token, and with it the app's other topics. Raises TopicNotAllowed."""
    if operator.is_limited and any(target.address for target in targets):
        raise TopicNotAllowed(
            f"{operator.name} has rights for some topics, and an address of checks gets the token of all of its app: leave "
            "it out, so that the app's own instances are asked, or ask an administrator of the center."
        )


def _in_words(operator: Operator) -> str:
    return " or ".join(operator.topics)


def _of_message(request: Any, catalog: Catalog) -> Iterator[str]:
    """Yield every topic the request names. A malformed id is refused later, as in every request."""
    if request.message_id:
        parsed = MessageId.parse(request.message_id)
        yield topic_name(catalog, parsed.topic) if parsed is not None else ""
    if topic := getattr(request, "topic", ""):
        yield topic


_NAMED: dict[Scope, Callable[[Any, Catalog], Iterator[str]]] = {
    Scope.TOPIC: lambda request, _catalog: filter(None, [request.topic]),
    Scope.NAME: lambda request, _catalog: filter(None, [request.name]),
    Scope.FILTER: lambda request, _catalog: filter(None, [request.filter.topic]),
    Scope.MESSAGE: _of_message,
    Scope.EVERYTHING: lambda _request, _catalog: iter(()),
}
