"""What a tenant with fresh environments and hanging endpoints takes from the checks of its neighbor.

One server over MariaDB. The neighbor's messages are decided by a gRPC endpoint in a process of its own, first alone, then
while another app has thousands of undecided messages due, each in an environment of its own, at an endpoint that takes
every call and never answers. Rounds alternate; the share is that of the medians.

    python -m benchmarks.hostile_checks [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks.drain import SERVICES, Drain

NEIGHBOUR, HOSTILE = 1, SERVICES - 1
MESSAGES = 20_000
TAGS = 5_000
ROUNDS = 3


def measure() -> dict[str, float]:
    """checks_neighbour_loss_share: 0.1 means that a tenth of the neighbor's checks per second was lost."""
    drain = Drain()
    try:
        drain.run("pages", str(drain.ports[NEIGHBOUR]))
        drain.run("hang", str(drain.ports[HOSTILE]))
        drain.drain(NEIGHBOUR, drain.fill(NEIGHBOUR, 2_000))  # warm up
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(drain.drain(NEIGHBOUR, drain.fill(NEIGHBOUR, MESSAGES)))
            hostile = drain.fill(HOSTILE, TAGS, fresh_tags=True)
            drain.begin(HOSTILE, hostile)
            beside.append(drain.drain(NEIGHBOUR, drain.fill(NEIGHBOUR, MESSAGES)))
            drain.forget(HOSTILE, hostile)
    finally:
        drain.stop()
    return {
        "checks_neighbour_per_s": round(statistics.median(alone)),
        "checks_neighbour_beside_hostile_per_s": round(statistics.median(beside)),
        "checks_neighbour_loss_share": round(1 - statistics.median(beside) / statistics.median(alone), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure()
    print(json.dumps(result) if options.json else "\n".join(f"{key:40} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
