"""The same shop in several stacks: paying an order and the message about it are one, and a coupon is given exactly once.

Start a center with `tmc dev`, a consumer with `python -m examples.shops.STACK consume`, then pay an order:

    sqlite3_shop    python -m examples.shops.sqlite3_shop pay 7
    flask_shop      flask --app examples.shops.flask_shop run, then POST /orders/7/pay
    fastapi_shop    uvicorn examples.shops.fastapi_shop:app, then POST /orders/7/pay
    django_shop     python -m examples.shops.django_shop runserver, then POST /orders/7/pay

TMC_ADDRESS says where the center is (127.0.0.1:50051), SHOP_URL where the database is (sqlite:///shop.db, as SQLAlchemy
writes it; for sqlite3_shop: SHOP_DATABASE=FILE).
"""
