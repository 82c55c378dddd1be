"""The comparisons as an SVG drawing: two bars a case, with the least and the most, and the ratio beside them."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from tests.benchmarks.compare.measured import Comparison, Spread

_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 420, 90, 56
_BAR, _GAP, _CASE = 14, 3, 48
_OURS, _THEIRS = "#2563a8", "#b0b7bf"
_STYLE = "font-family:system-ui,sans-serif;font-size:12px"


def plot(comparisons: Sequence[Comparison], title: str) -> str:
    """The drawing; bars are as long as tokens a second, each case to its own scale."""
    height = _TOP + _CASE * len(comparisons) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" style="{_STYLE}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(12, 24, title, "font-weight:bold;font-size:14px"),
        _text(
            12, 42, "tokens a second, each case to its own scale; whiskers: least and most of the rounds", "fill:#555"
        ),
    ]
    for number, one in enumerate(comparisons):
        parts += _case(one, _TOP + _CASE * number)
    return "\n".join([*parts, "</svg>", ""])


def _case(one: Comparison, top: float) -> list[str]:
    spreads = [Spread.of(one.ours_tok_s), Spread.of(one.theirs_tok_s)]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(spread.most for spread in spreads)
    parts = [_text(12, top + 13, one.case, "font-weight:bold")]
    for row, (name, spread, colour) in enumerate([(one.ours, spreads[0], _OURS), (one.theirs, spreads[1], _THEIRS)]):
        y = top + row * (_BAR + _GAP)
        middle = y + _BAR / 2
        low, high = (_LEFT + scale * value for value in (spread.least, spread.most))
        parts += [
            _text(_LEFT - 8, y + 11, name, "text-anchor:end"),
            f'<rect x="{_LEFT}" y="{y}" width="{scale * spread.median:.1f}" height="{_BAR}" fill="{colour}"/>',
            f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="#222"/>',
            _text(_LEFT + 5, y + 11, f"{spread.median:.0f}", "fill:#fff" if row == 0 else "fill:#222"),
        ]
    parts.append(_text(_WIDTH - 12, top + 20, f"{one.ratio.median:.2f}x", "text-anchor:end;font-size:16px"))
    return parts


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" style="{style}">{escape(text)}</text>'
