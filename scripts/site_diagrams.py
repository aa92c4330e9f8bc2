"""Draws the Mermaid diagrams of the documentation as SVG: code hosts draw them by a program that a site would have to fetch.

Known: `sequenceDiagram` with participants, arrows and notes, and `stateDiagram-v2` with transitions.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from html import escape

Point = tuple[float, float]

_COLUMN, _ROW, _MARGIN = 190, 44, 60
_ARROW = re.compile(r"(\w+)(--?>>|--?x)(\w+): (.*)")
_NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.*)")
_TRANSITION = re.compile(r"(\S+) --> (\S+): (.*)")
_BOX: Point = (124, 34)
_STATES: Mapping[str, Point] = {
    "[*]": (20, 90),
    "PREPARED": (170, 140),
    "CHECK_FAILED": (390, 140),
    "COMMITTED": (610, 40),
    "ROLLED_BACK": (610, 240),
    "WAITING": (170, 40),
    "SCHEDULED": (170, 240),
    "FAILED": (390, 300),
    "ACKED": (610, 90),
    "CANCELLED": (610, 210),
}
"""The middle of each state."""
_STYLE = "".join(
    f".drawn {rule}"  # nothing else on the page
    for rule in (
        "text{font:13px sans-serif;fill:currentColor}",
        ":is(path,line,rect){stroke:currentColor;fill:none;stroke-width:1.3}",
        ".head{fill:currentColor}",
        ".box{fill:var(--md-default-bg-color,#fff)}",
        ".late{stroke-dasharray:5 4}",
        ".soft{opacity:.35}",
    )
)


def drawn(source: str) -> str:
    """Return a diagram as one line of SVG in the color of the text around it. Raises ValueError for unknown lines."""
    kind, *lines = [line.strip() for line in source.strip().splitlines()]
    match kind:
        case "sequenceDiagram":
            size, shapes = _sequence(lines)
        case "stateDiagram-v2":
            size, shapes = _states(lines)
        case _:
            raise ValueError(f"unknown diagram {kind!r}")
    width, height = (math.ceil(each) for each in size)
    head = f'<svg class="drawn" viewBox="0 0 {width} {height}" style="max-width:{width}px;width:100%" role="img" xmlns="http://www.w3.org/2000/svg">'
    return f"{head}<style>{_STYLE}</style>{''.join(shapes)}</svg>"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{escape(text)}</text>'


def _arrow(start: Point, end: Point, *, kind: str = "", is_lost: bool = False) -> str:
    """Draw a line with a head at its end; or with a cross, for what never arrives."""
    angle = math.atan2(end[1] - start[1], end[0] - start[0])
    line = f'<line class="{kind}" x1="{start[0]:.0f}" y1="{start[1]:.0f}" x2="{end[0]:.0f}" y2="{end[1]:.0f}"/>'
    if is_lost:
        x, y = end
        return line + f'<path d="M{x - 5:.0f} {y - 5:.0f}l10 10m0 -10l-10 10"/>'
    corners = [(end[0] - 9 * math.cos(angle + turn), end[1] - 9 * math.sin(angle + turn)) for turn in (0.4, -0.4)]
    points = " ".join(f"L{x:.1f} {y:.1f}" for x, y in corners)
    return line + f'<path class="head" d="M{end[0]:.1f} {end[1]:.1f}{points}Z"/>'


def _box(middle: Point, size: Point, text: str) -> str:
    (x, y), (width, height) = middle, size
    corner = f'x="{x - width / 2:.0f}" y="{y - height / 2:.0f}"'
    rect = f'<rect class="box" {corner} width="{width:.0f}" height="{height:.0f}" rx="6"/>'
    return rect + _text(x, y + 5, text)


def _sequence(lines: list[str]) -> tuple[Point, list[str]]:
    places: dict[str, float] = {}
    shapes: list[str] = []
    y = 2 * _MARGIN + _BOX[1]
    for line in lines:
        if named := re.fullmatch(r"participant (\w+) as (.*)", line):
            places[named[1]] = _MARGIN + _BOX[0] / 2 + _COLUMN * len(places)
            shapes.append(_box((places[named[1]], _MARGIN + _BOX[1] / 2), (150, _BOX[1]), named[2]))
        elif note := _NOTE.fullmatch(line):
            first, last = places[note[1]], places[note[2] or note[1]]
            shapes.append(_box(((first + last) / 2, y + 2), (last - first + 7.5 * len(note[3]) + 16, 28), note[3]))
            y += _ROW
        elif arrow := _ARROW.fullmatch(line):
            start, end = places[arrow[1]], places[arrow[3]]
            is_lost = arrow[2].endswith("x")
            stop = start + (end - start) * (0.6 if is_lost else 1)
            shapes.append(_text((start + end) / 2, y - 6, arrow[4]))
            kind = "late" if arrow[2].startswith("--") else ""
            shapes.append(_arrow((start, y + 2), (stop, y + 2), kind=kind, is_lost=is_lost))
            y += _ROW
        else:
            raise ValueError(f"unknown line in a sequence: {line!r}")
    lives = [f'<line class="soft" x1="{x}" y1="{_MARGIN + _BOX[1]}" x2="{x}" y2="{y}"/>' for x in places.values()]
    return (max(places.values()) + 75 + _MARGIN, y + _MARGIN), lives + shapes


def _states(lines: list[str]) -> tuple[Point, list[str]]:
    edges: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for line in lines:
        found = _TRANSITION.fullmatch(line)
        if found is None:
            raise ValueError(f"unknown line in a state diagram: {line!r}")
        edges[found[1], found[2]].append(found[3])
    names = {name for edge in edges for name in edge}
    shapes = [_box(_STATES[name], _BOX, name) for name in sorted(names - {"[*]"})]
    x, y = _STATES["[*]"]
    shapes.append(f'<path class="head" d="M{x - 6} {y}a6 6 0 1 0 12 0a6 6 0 1 0 -12 0"/>')
    for (start, end), letters in edges.items():
        text = " ".join(letters)
        if start == end:
            x, y = _STATES[start]
            shapes.append(f'<path d="M{x - 30} {y + _BOX[1] / 2}c-10 40 70 40 60 0"/>' + _text(x, y + 62, text))
            continue
        (x1, y1), (x2, y2) = _STATES[start], _STATES[end]
        apart = 7 if (end, start) in edges else 0  # two arrows between the same states lie side by side
        length = math.dist((x1, y1), (x2, y2))
        dx, dy = -apart * (y2 - y1) / length, apart * (x2 - x1) / length
        a, b = _edge((x1, y1), (x2, y2), start), _edge((x2, y2), (x1, y1), end)
        a, b = (a[0] + dx, a[1] + dy), (b[0] + dx, b[1] + dy)
        shapes.append(_arrow(a, b))
        at = (a[0] + 0.4 * (b[0] - a[0]), a[1] + 0.4 * (b[1] - a[1]))
        side = 1 if apart and dy > 0 else -1
        shapes.append(_text(at[0] + (8 if x1 == x2 else 0), at[1] + (16 if side > 0 else -6), text))
    places = [_STATES[name] for name in names]
    return (max(x for x, _ in places) + 90, max(y for _, y in places) + 80), shapes


def _edge(inside: Point, outside: Point, name: str) -> Point:
    """Return where the line between two middles leaves the shape around the first one."""
    dx, dy = outside[0] - inside[0], outside[1] - inside[1]
    if name == "[*]":
        length = math.hypot(dx, dy)
        return inside[0] + 7 * dx / length, inside[1] + 7 * dy / length
    reach = min(_BOX[0] / 2 / abs(dx) if dx else math.inf, _BOX[1] / 2 / abs(dy) if dy else math.inf)
    return inside[0] + reach * dx, inside[1] + reach * dy
