"""Text of our tables is compared exactly on MariaDB and MySQL, where 0001 left it to the database's collation."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from tmc_client.tables import CONVERT, INEXACT


def convert(_apps: Any, editor: Any) -> None:
    if editor.connection.vendor != "mysql":
        return
    with editor.connection.cursor() as cursor:
        cursor.execute(str(INEXACT))
        names = dict.fromkeys(row[0] for row in cursor.fetchall())
    for name in names:
        editor.execute(f"ALTER TABLE {name} {CONVERT}")


class Migration(migrations.Migration):
    dependencies: ClassVar = [("tmc", "0001_initial")]
    operations: ClassVar = [migrations.RunPython(convert, migrations.RunPython.noop, atomic=False)]
