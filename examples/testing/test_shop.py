"""A producer and a consumer under test: the real center in this process, on a manual clock."""

from datetime import timedelta

import pytest

from examples.shops import sqlite3_shop as shop


@pytest.fixture
def orders(tmc_center, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOP_DATABASE", str(tmp_path / "shop.db"))
    shop.prepare_database()
    center = tmc_center.connect(app="orders")
    center.checks(shop.connect)
    return center


def test_an_order_that_is_paid_is_announced(tmc_center, orders):
    shop.pay(orders, 7)
    tmc_center.assert_published("order.paid", key="paid-7", body={"order": 7})


def test_each_order_gets_one_coupon(tmc_center, orders):
    tmc_center.consume(shop.coupons(tmc_center.connect(app="coupons")))
    shop.pay(orders, 7)
    tmc_center.redeliver("order.paid", "paid-7")
    tmc_center.assert_nothing_open()
    assert shop.numbers("coupon") == [7]


def test_a_crash_after_the_commit_loses_nothing(tmc_center, orders):
    tmc_center.consume(shop.coupons(tmc_center.connect(app="coupons")))
    with tmc_center.crash_after("local_commit"):
        shop.pay(orders, 7)
    assert shop.numbers("coupon") == []
    tmc_center.advance(timedelta(seconds=30))
    assert shop.numbers("coupon") == [7]
