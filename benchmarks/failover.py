"""The primary of a center's database is killed `--kills` times under traffic, and its replica promoted a second later.

`away_ms_*`: from the promotion until a call was answered that began after the kill. What was answered before, and is missing
or not consumed afterwards, is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics

from tests.support.cluster import KINDS
from tests.support.failing_over import fail_over
from tmc_storm.services.replicated import ReplicatedMariaDB, ReplicatedPostgreSQL


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--database", choices=KINDS, default="mariadb")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--promoted-after", type=float, default=1.0, metavar="S")
    parser.add_argument("--silently", action="store_true", help="stop the primary's processes instead of killing them")
    options = parser.parse_args()
    database = ReplicatedMariaDB() if options.database == "mariadb" else ReplicatedPostgreSQL()
    seen = fail_over(database, kills=options.kills, promoted_after_s=options.promoted_after, silently=options.silently)
    away = sorted(1000 * each for each in seen.away_s)
    result = {
        "database": options.database,
        "silently": options.silently,
        "kills": len(away),
        "away_ms_p50": round(statistics.median(away)),
        "away_ms_p95": round(away[int(0.95 * (len(away) - 1))]),
        "away_ms_max": round(away[-1]),
        "answered": seen.answered,
        "missing": seen.missing,
        "not_consumed": seen.not_consumed,
        "failed_calls": len(seen.failed),
    }
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
