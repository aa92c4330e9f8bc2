"""The use cases behind the RPCs of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tmc_server.domain.catalog import Catalog
from tmc_server.requests.administering import Administering
from tmc_server.requests.alerts import Alerts
from tmc_server.requests.auditing import Auditing
from tmc_server.requests.browsing import Browsing
from tmc_server.requests.bulk import BulkJobs
from tmc_server.requests.deciding_by_hand import DecidingByHand
from tmc_server.requests.delivery_control import DeliveryControl
from tmc_server.requests.explaining import Explaining
from tmc_server.requests.lookup import Lookup
from tmc_server.requests.operators import Operators
from tmc_server.requests.overviewing import Overviewing
from tmc_server.requests.proposals import Proposals
from tmc_server.requests.searching import Searching
from tmc_server.requests.signing import Signing
from tmc_server.requests.timeline import Timelines
from tmc_server.settings import Setting


@dataclass(frozen=True, kw_only=True)
class AdminParts:
    """The base of each part of tmc.v1.AdminService. server: the name of this one."""

    administering: Administering
    signing: Signing
    deliveries: DeliveryControl
    by_hand: DecidingByHand
    bulk: BulkJobs
    proposals: Proposals
    operators: Operators
    alerts: Alerts
    lookup: Lookup
    browsing: Browsing
    explaining: Explaining
    timelines: Timelines
    overviewing: Overviewing
    auditing: Auditing
    searching: Searching
    server: str
    settings: Sequence[Setting]

    @property
    def catalog(self) -> Catalog:
        return self.administering.catalog
