"""The archive's yardstick: the same rows exported by one connection, a streaming cursor and Arrow, nothing verified."""

from __future__ import annotations

import time
from pathlib import Path

import MySQLdb
import MySQLdb.cursors
import pyarrow as pa
import pyarrow.parquet as pq

_PAGE = 20_000


def rows_per_s(port: int, databases: list[tuple[str, list[int]]], folder: Path) -> float:
    """databases: (name, its shards). Every message and consumption row, one file per kind of table."""
    began, rows = time.monotonic(), 0
    for kind in ("message", "consumption"):
        writer = None
        for name, shards in databases:
            connection = MySQLdb.connect(
                host="127.0.0.1", port=port, user="root", db=name, cursorclass=MySQLdb.cursors.SSCursor
            )
            for shard in shards:
                with connection.cursor() as cursor:
                    cursor.execute(f"SELECT * FROM tmc_{kind}_{shard:02d}")
                    names = [column[0] for column in cursor.description]
                    while page := cursor.fetchmany(_PAGE):
                        columns = [list(column) for column in zip(*page, strict=True)]
                        table = pa.table(columns, names=names)
                        writer = writer or pq.ParquetWriter(folder / f"{kind}.parquet", table.schema)
                        writer.write_table(table.cast(writer.schema))
                        rows += len(page)
            connection.close()
        if writer is not None:
            writer.close()
    return rows / (time.monotonic() - began)
