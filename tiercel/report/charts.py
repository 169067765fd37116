"""Charts as static inline SVG. Colours come from the page's CSS classes, so that they follow light and dark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM, BAR = 44, 10, 22, 30, 26
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_VALUES_SHOWN = 14
"""More bars than this have their value in the tooltip alone."""

Form = Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one colour; ``look`` is a CSS class. None: nothing to show at this place."""

    name: str
    look: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a lying bar; ``look`` is a CSS class, ``text`` says how much it is."""

    name: str
    look: str
    share: float
    text: str


def bars(labels: Sequence[str], series: Sequence[Series], form: Form, about: str, top: float | None = None) -> Markup:
    """Groups of upright bars.

    Args:
        labels: one per group, at least one.
        series: one bar of each in every group; values of at least 0.
        form: writes a value.
        about: what the chart shows, for those who cannot see it.
        top: end of the axis; None: above the highest value.
    """
    end = top or _round_up(max((v for s in series for v in s.values if v is not None), default=0))
    slot = PLOT_WIDTH / len(labels)
    width = min(46.0, slot * 0.72 / len(series))
    show_values = len(labels) * len(series) <= MAX_VALUES_SHOWN
    parts = [_grid(end, form)]
    for group, label in enumerate(labels):
        middle = LEFT + slot * (group + 0.5)
        for index, one in enumerate(series):
            value = one.values[group]
            left = middle + width * (index - len(series) / 2)
            parts.append(_bar(one, value, left, width, end, f"{label}, {one.name}: {form(value)}"))
            if show_values:
                parts.append(_text(left + width / 2, _y(value or 0, end) - 5, form(value), "value"))
    step = ceil(len(labels) / 10)
    parts += [_text(LEFT + slot * (i + 0.5), HEIGHT - 10, labels[i], "tick") for i in range(0, len(labels), step)]
    return _svg(parts, about) + _legend(series)


def line(places: Sequence[float], series: Sequence[Series], form: Form, unit: str, about: str) -> Markup:
    """Lines over ascending places, at least one; a single place is a dot.

    Args:
        places: where on the axis.
        series: values of at least 0; a None interrupts its line.
        form: writes a value.
        unit: of the places.
        about: see ``bars``.
    """
    end = _round_up(max((v for s in series for v in s.values if v is not None), default=0))
    first, last = places[0], places[-1]
    scale = PLOT_WIDTH / (last - first) if last > first else 0.0
    xs = [LEFT + (place - first) * scale if scale else LEFT + PLOT_WIDTH / 2 for place in places]
    parts = [_grid(end, form)]
    for one in series:
        for run in _runs(xs, one.values):
            points = " ".join(f"{x:.1f},{_y(v, end):.1f}" for x, v in run)
            parts.append(Markup('<polyline class="line {}" points="{}"/>').format(one.look, points))
            parts += [_dot(one, x, v, end, form) for x, v in run]
    ticks = {first, last} if scale else {first}
    for place in sorted(ticks):
        anchor = "tick" if not scale else "tick start" if place == first else "tick end"
        parts.append(_text(xs[0] if place == first else xs[-1], HEIGHT - 10, f"{place:.1f} {unit}", anchor))
    return _svg(parts, about) + _legend(series)


def stacks(rows: Sequence[tuple[str, Sequence[Part]]], about: str) -> Markup:
    """Lying bars, each of parts whose shares sum to 1.

    Args:
        rows: label (may be empty) and parts of each bar.
        about: see ``bars``.
    """
    drawn, y = [], 0.0
    for label, parts in rows:
        if label:
            drawn.append(_text(0, y + 14, label, "name"))
            y += 20
        left = 0.0
        for part in parts:
            width = max(0.0, part.share) * WIDTH
            shape = '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"><title>{}: {}</title></rect>'
            drawn.append(Markup(shape).format(part.look, left, y, width, BAR, part.name, part.text))
            left += width
        y += BAR + 10
    return _svg(drawn, about, height=y - 10)


def legend(items: Sequence[tuple[str, str]]) -> Markup:
    """What colours mean: text and CSS class of each."""
    item = Markup('<li><i class="{}"></i>{}</li>')
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(item.format(look, text) for text, look in items))


def _bar(one: Series, value: float | None, left: float, width: float, end: float, tip: str) -> Markup:
    y = _y(value or 0, end)
    shape = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2"><title>{}</title></rect>'
    return Markup(shape).format(one.look, left + 1, y, width - 2, TOP + PLOT_HEIGHT - y, tip)


def _dot(one: Series, x: float, value: float, end: float, form: Form) -> Markup:
    shape = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="2.6"><title>{}: {}</title></circle>'
    return Markup(shape).format(one.look, x, _y(value, end), one.name, form(value))


def _runs(xs: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Points that a line connects: it is broken where nothing was counted."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, value in zip(xs, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((x, value))
    return [run for run in runs if run]


def _grid(end: float, form: Form) -> Markup:
    drawn = []
    for share in (0, 0.5, 1):
        y = TOP + PLOT_HEIGHT * (1 - share)
        shape = '<path class="grid" d="M{} {:.1f}H{}"/><text class="axis" x="{}" y="{:.1f}">{}</text>'
        drawn.append(Markup(shape).format(LEFT, y, WIDTH - RIGHT, LEFT - 6, y + 4, form(end * share)))
    return Markup("").join(drawn)


def _text(x: float, y: float, text: str, look: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(look, x, y, text)


def _legend(series: Sequence[Series]) -> Markup:
    return legend([(one.name, one.look) for one in series])


def _svg(parts: Sequence[Markup], about: str, height: float = HEIGHT) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, height, escape(about))
    return head + Markup("").join(parts) + Markup("</svg>")


def _y(value: float, end: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - value / end)


def _round_up(value: float) -> float:
    """The next round number whose half is round too; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))
