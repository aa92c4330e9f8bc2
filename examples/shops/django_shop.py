"""Django in one file. A project has the same in settings.py, models.py, views.py and wsgi.py."""

import os
import sys

import django
from django.conf import settings
from django.core.management import call_command, execute_from_command_line
from django.http import HttpRequest, HttpResponse
from django.urls import path
from sqlalchemy import make_url

URL = make_url(os.environ.get("SHOP_URL", "sqlite:///shop.db"))
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": URL.database, "OPTIONS": {"transaction_mode": "IMMEDIATE"}}
POSTGRESQL = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": URL.database,
    "HOST": URL.host,
    "PORT": URL.port,
    "USER": URL.username,
}

settings.configure(
    DEBUG=True,
    SECRET_KEY="look around",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["tmc_client.django"],
    DATABASES={"default": SQLITE if URL.get_backend_name() == "sqlite" else POSTGRESQL},
    TMC={
        "ADDRESS": os.environ.get("TMC_ADDRESS", "127.0.0.1:50051"),
        "APP": "coupons" if "consume" in sys.argv else "orders",
    },
)
django.setup()

from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import connection, models  # noqa: E402

import tmc_client as tmc  # noqa: E402
from tmc_client import django as tmc_django  # noqa: E402


class Paid(models.Model):
    number = models.IntegerField(primary_key=True)

    class Meta:
        app_label = "shop"
        db_table = "paid"


class Coupon(models.Model):
    number = models.IntegerField(primary_key=True)

    class Meta:
        app_label = "shop"
        db_table = "coupon"


def pay(_request: HttpRequest, number: int) -> HttpResponse:
    with tmc_django.transaction() as tx:
        Paid.objects.create(number=number)
        tx.send("order.paid", {"order": number}, key=f"paid-{number}")
    return HttpResponse("paid\n")


urlpatterns = [path("orders/<int:number>/pay", pay)]
application = tmc_django.center().checks(tmc_django.connect()).beside(get_wsgi_application())  # POST /tmc/checks


def prepare_database() -> None:
    call_command("migrate", verbosity=0)
    there = connection.introspection.table_names()
    with connection.schema_editor() as editor:
        for model in (Paid, Coupon):
            if model._meta.db_table not in there:
                editor.create_model(model)


def consume() -> None:
    consumer = tmc.Consumer(tmc_django.center())

    @consumer.listener("order.paid", inbox=tmc_django.inbox())
    def give_coupon(paid: dict[str, int]) -> None:
        Coupon.objects.create(number=paid["order"])

    consumer.run()


if __name__ == "__main__":
    prepare_database()
    if "consume" in sys.argv:
        consume()
    else:
        execute_from_command_line(sys.argv)
