"""Draws what a message costs against subscribers, body and shards: measured, and by the lines of `tmc size`.

usage: python -m benchmarks.capacity_picture REPORT.json PICTURE.svg      REPORT.json: what `bench capacity --json` printed
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from benchmarks.capacity import PARTS, Shape
from tmc_cli.size import Costs, costs_of

_NAME = re.compile(r"(mariadb|postgresql)_(\d+)x(\d+)_in_(\d+)_shards_of_(\d+)_databases")
_DIMENSIONS = {
    "subscribers": [Shape(count, 256) for count in range(1, 11)],
    "KiB of a body": [Shape(1, kib << 10) for kib in range(17)],
    "shards in use": [Shape(1, 256, count) for count in range(1, 33)],
}
_COLORS = {"server": "#2a6f97", "database": "#bc6c25", "broker": "#588157"}
_STYLES = {"mariadb": "-", "postgresql": "--"}


def _along(name: str, shape: Shape) -> float | None:
    """The place of a shape in this dimension; None: it differs from the usual one in another, too."""
    usual = {
        "subscribers": shape.subscribers == 1,
        "KiB of a body": shape.body_bytes == 256,
        "shards in use": shape.shards == 1,
    }
    if shape.databases > 1 or not all(is_usual for each, is_usual in usual.items() if each != name):
        return None
    return {"subscribers": shape.subscribers, "KiB of a body": shape.body_bytes / 1024, "shards in use": shape.shards}[
        name
    ]


def main(report: str, picture: str) -> None:
    lines = json.loads(Path(report).read_text())
    measured: dict[str, dict[Shape, Mapping[str, float]]] = {}
    for name, costing in lines.items():
        if found := _NAME.fullmatch(name):
            measured.setdefault(found[1], {})[Shape(*map(int, found.groups()[1:]))] = costing
    figure, axes = plt.subplots(1, len(_DIMENSIONS), figsize=(10, 3.4), sharey=False, layout="constrained")
    for axis, (dimension, shapes) in zip(axes, _DIMENSIONS.items(), strict=True):
        for kind, costings in measured.items():
            costs: Costs = costs_of(kind)
            for part in PARTS:
                found = ((_along(dimension, shape), costing[part]) for shape, costing in costings.items())
                points = sorted((x, y) for x, y in found if x is not None)
                axis.plot(
                    *zip(*points, strict=True),
                    "o" if kind == "mariadb" else "s",
                    color=_COLORS[part],
                    markersize=4,
                )
                xs = [_along(dimension, shape) for shape in shapes]
                ys = [costs.cores(part, shape.load) * 1e6 for shape in shapes]
                axis.plot(xs, ys, _STYLES[kind], color=_COLORS[part], linewidth=1, label=f"{part}, {kind}")
        axis.set_xlabel(dimension)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("microseconds of a core per message")
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
