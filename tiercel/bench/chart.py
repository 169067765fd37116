"""A bar chart as SVG: medians as bars, the spread as a line across the end of each."""

from collections.abc import Mapping
from xml.sax.saxutils import escape

from tiercel.bench.samples import Spread

WIDTH, LABEL, BAR, GAP, TOP, VALUE = 760, 210, 22, 12, 48, 90
OURS, OTHERS, INK = "#2f7d4f", "#8a94a6", "#1c2330"


def bars(title: str, values: Mapping[str, Spread], ours: frozenset[str] = frozenset()) -> str:
    """An SVG picture of at least one bar.

    Args:
        title: with the unit.
        values: spreads of positive numbers by label, from top to bottom.
        ours: labels drawn in the first colour.
    """
    scale = (WIDTH - LABEL - VALUE) / max(spread.most for spread in values.values())
    height = TOP + len(values) * (BAR + GAP)
    rows = [
        _row(name, spread, TOP + i * (BAR + GAP), scale, name in ours)
        for i, (name, spread) in enumerate(values.items())
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            f'<text x="12" y="26" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>',
            *rows,
            "</svg>\n",
        ]
    )


def _row(name: str, spread: Spread, top: int, scale: float, is_ours: bool) -> str:
    middle, end = top + BAR / 2, LABEL + spread.most * scale
    colour = OURS if is_ours else OTHERS
    return (
        f'<text x="{LABEL - 8}" y="{middle + 5:.1f}" text-anchor="end" fill="{INK}">{escape(name)}</text>'
        f'<rect x="{LABEL}" y="{top}" width="{spread.median * scale:.1f}" height="{BAR}" fill="{colour}"/>'
        f'<path d="M{LABEL + spread.least * scale:.1f} {middle}H{end:.1f}" stroke="{INK}" stroke-width="2"/>'
        f'<text x="{end + 8:.1f}" y="{middle + 5:.1f}" fill="{INK}">{spread.median:.1f}</text>'
    )
