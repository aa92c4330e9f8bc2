"""Admin commands about apps and their keys."""

from __future__ import annotations

import typer

from tmc_cli.admin.calling import Reason, call, list_all
from tmc_common.protocol import admin_pb2


def register_app(
    context: typer.Context,
    id: str,
    service_name: str = "",
    biz_id: str = "",
    alert_email: str = "",
    alert_phone: str = "",
) -> None:
    """Register a service; its key is in the answer, once."""
    request = admin_pb2.RegisterAppRequest(
        id=id, service_name=service_name, biz_id=biz_id, alert_email=alert_email, alert_phone=alert_phone
    )
    call(context, "RegisterApp", request, admin_pb2.RegisterAppResponse)


def add_app_key(context: typer.Context, id: str, replace_newest: bool = False, tag: str = "") -> None:
    """Create a second key for a rotation; both are valid. --tag: valid in one environment only.

    --replace-newest: replace the newest key, whose answer was lost.
    """
    request = admin_pb2.AddAppKeyRequest(id=id, replace_newest=replace_newest, tag=tag)
    call(context, "AddAppKey", request, admin_pb2.AddAppKeyResponse)


def drop_old_app_key(context: typer.Context, id: str, tag: str = "", drop_newest: bool = False) -> None:
    """End a rotation: only the newest key stays valid. --tag: one environment's keys; --drop-newest: drop all."""
    request = admin_pb2.DropOldAppKeyRequest(id=id, tag=tag, drop_newest=drop_newest)
    call(context, "DropOldAppKey", request, admin_pb2.DropOldAppKeyResponse)


def rotate_check_token(context: typer.Context, id: str, reason: Reason) -> None:
    """Replace the token that checks of an app's messages carry; services with the SDK learn the new one by themselves."""
    request = admin_pb2.RotateCheckTokenRequest(id=id, reason=reason)
    call(context, "RotateCheckToken", request, admin_pb2.RotateCheckTokenResponse)


def disable_app(context: typer.Context, id: str, reason: Reason) -> None:
    """Refuse all calls of an app and end its streams. Its messages are still checked, its deliveries are kept."""
    request = admin_pb2.DisableAppRequest(id=id, reason=reason)
    call(context, "DisableApp", request, admin_pb2.DisableAppResponse)


def enable_app(context: typer.Context, id: str, reason: Reason) -> None:
    """Accept calls of a disabled app again."""
    call(context, "EnableApp", admin_pb2.EnableAppRequest(id=id, reason=reason), admin_pb2.EnableAppResponse)


def list_apps(context: typer.Context) -> None:
    """List apps."""
    list_all(context, "ListApps", admin_pb2.ListAppsRequest(), admin_pb2.ListAppsResponse)
