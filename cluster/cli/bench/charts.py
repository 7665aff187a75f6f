"""Plots as inline SVG: no script, no font, nothing from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from typing import Final

WIDTH, HEIGHT = 680, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 20, 54
COLOURS: Final = ("#2f6db5", "#d9822b", "#3d9a5f", "#8a5ab0", "#c0444d", "#5b6b7a", "#b59a1f")


@dataclass(frozen=True, slots=True)
class Line:
    """A series of points, each with a label that stands beside it."""

    name: str
    points: Sequence[tuple[float, float, str]]


def ticks(most: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 up to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    size = 10 ** floor(log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough * 0.999)
    found = [0.0]
    while found[-1] < most * 0.999:
        found.append(round(found[-1] + step, 10))
    return found


def curve(lines: Sequence[Line], x_title: str, y_title: str) -> str:
    """Return lines through points, from the origin."""
    xs = ticks(max((x for line in lines for x, _, _ in line.points), default=1.0))
    ys = ticks(max((y for line in lines for _, y, _ in line.points), default=1.0))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + wide * x / xs[-1], TOP + high * (1 - y / ys[-1])

    parts = []
    for x in xs:
        place, _ = at(x, 0)
        parts.append(_rule(place, TOP, place, TOP + high))
        parts.append(_text(place, TOP + high + 18, f"{x:g}", "middle"))
    for y in ys:
        _, place = at(0, y)
        parts.append(_rule(LEFT, place, LEFT + wide, place))
        parts.append(_text(LEFT - 8, place + 4, f"{y:g}", "end"))
    parts.append(_text(LEFT + wide / 2, HEIGHT - 12, x_title, "middle"))
    turn = f' transform="rotate(-90 16 {TOP + high / 2:.1f})"'
    parts.append(_text(16, TOP + high / 2, y_title, "middle", turn))
    for line, colour in zip(lines, COLOURS * len(lines), strict=False):
        places = [(*at(x, y), label) for x, y, label in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, label in places:
            title = f"<title>{escape(line.name)} {escape(label)}</title>"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{title}</circle>'
            )
            near_end = x > LEFT + wide - 60
            anchor, shift = ("end", -7) if near_end else ("start", 7)
            parts.append(_text(x + shift, y - 7, label, anchor))
    return _svg(HEIGHT, parts, f"{y_title} over {x_title}") + _legend([line.name for line in lines])


def stacked(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Return one bar of full width for each row, cut by shares that add up to one."""
    names = list(rows[0][1]) if rows else []
    wide, parts = WIDTH - LEFT - 60, []
    for number, (label, shares) in enumerate(rows):
        y, x = 8 + 34 * number, float(LEFT + 30)
        parts.append(_text(x - 8, y + 17, label, "end"))
        for name, colour in zip(names, COLOURS, strict=False):
            width = wide * shares[name]
            title = f"<title>{escape(name)} {100 * shares[name]:.1f} %</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{colour}">'
                f"{title}</rect>"
            )
            if width > 38:
                parts.append(_text(x + width / 2, y + 17, f"{100 * shares[name]:.0f} %", "middle",
                                   ' style="fill:#fff"'))  # fmt: skip
            x += width
    return _svg(16 + 34 * len(rows), parts, "shares of time") + _legend(names)


def bars(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """Return one bar for each row, as long as its number."""
    most = max((value for _, value in rows), default=1.0) or 1.0
    wide, parts = WIDTH - LEFT - 130, []
    for number, (label, value) in enumerate(rows):
        y, width = 8 + 34 * number, wide * value / most
        parts.append(_text(LEFT + 22, y + 17, label, "end"))
        parts.append(
            f'<rect x="{LEFT + 30}" y="{y}" width="{width:.1f}" height="24" fill="{COLOURS[0]}">'
            f"<title>{escape(label)}: {value:.2f} {escape(unit)}</title></rect>"
        )
        parts.append(_text(LEFT + 38 + width, y + 17, f"{value:.2f}", "start"))
    return _svg(16 + 34 * len(rows), parts, unit)


def _svg(height: int, parts: Sequence[str], about: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(about)}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _legend(names: Sequence[str]) -> str:
    items = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in zip(names, COLOURS * len(names), strict=False)
    )
    return f'<p class="legend">{"".join(items)}</p>'
