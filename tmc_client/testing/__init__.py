"""A center for your unit tests: the real one, in this process, on a manual clock.

    def test_an_order_is_announced(tmc_center):          # a pytest fixture of this package
        place_order(tmc_center.connect(app="orders"), "order-1")
        tmc_center.assert_published("order.paid", key="order-1", body={"amount": 12})
        tmc_center.assert_nothing_open()

Needs `tmc-center[server]`. See docs/testing.md.
"""

from tmc_client.testing.center import ManualCenter, Published
from tmc_client.testing.faults import Crashed

__all__ = ["Crashed", "ManualCenter", "Published"]
