"""The parts that a report is drawn with: plain HTML and CSS, readable on a phone, in the dark and on paper."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = """:root{color-scheme:light dark;--text:#1f2328;--soft:#59636e;--line:#d1d9e0;--back:#fff;--box:#f6f8fa;--bar:#3b76c4;--warn:#fff1e5;--edge:#bc4c00}
@media(prefers-color-scheme:dark){:root{--text:#e6edf3;--soft:#9aa4af;--line:#3d444d;--back:#0d1117;--box:#161b22;--bar:#4d8fe0;--warn:#2f1d10;--edge:#db6d28}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:64rem;margin:0 auto;padding:1rem}
h1{font-size:1.7rem;margin:.5rem 0}h2{font-size:1.25rem;margin:2.2rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--line)}h3{font-size:1rem;margin:1.2rem 0 .3rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.6rem;margin:1rem 0}
.tiles div{background:var(--box);border:1px solid var(--line);border-radius:6px;padding:.6rem .8rem;color:var(--soft)}
.tiles b{display:block;font-size:1.35rem;color:var(--text)}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.5rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;white-space:nowrap}
th{color:var(--soft);font-weight:600}
td:first-child,th:first-child,.t,.w{text-align:left}td.w{white-space:normal;min-width:14rem;max-width:34rem;overflow-wrap:anywhere}
.bars{display:grid;grid-template-columns:minmax(7rem,max-content) minmax(3rem,1fr) max-content max-content;gap:.15rem .8rem;align-items:center;font-variant-numeric:tabular-nums}
.bars>*{min-width:0;overflow-wrap:anywhere}.bars .n{text-align:right}.bars .m{text-align:right;color:var(--soft)}
.bars i{display:block;background:var(--bar);height:.9rem;border-radius:2px;min-width:1px}
pre{background:var(--box);border:1px solid var(--line);border-radius:6px;padding:.7rem;margin:.3rem 0 .8rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px;line-height:1.4}
.where{color:var(--soft);margin:.6rem 0 .2rem;overflow-wrap:anywhere;font-size:13px}
.warn{background:var(--warn);border-left:4px solid var(--edge);padding:.6rem .9rem;margin:.6rem 0}.warn p{margin:.2rem 0}
.box{border:1px solid var(--line);border-radius:6px;padding:.2rem .9rem .6rem;margin:.8rem 0}
summary{cursor:pointer;color:var(--soft)}details{margin:.5rem 0}
@media(max-width:36rem){main{padding:.7rem}.bars{grid-template-columns:minmax(0,1fr) max-content max-content}.bars .l{grid-column:1/-1;margin-top:.3rem}}"""


def section(title: str, inside: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{inside}</section>"


def details(title: str, inside: str) -> str:
    """Folded until it is asked for."""
    return f"<details><summary>{html.escape(title)}</summary>{inside}</details>"


def notice(lines: Iterable[str]) -> str:
    """What a reader must not miss."""
    return '<div class="warn">' + "".join(f"<p>{html.escape(line)}</p>" for line in lines) + "</div>"


def tiles(numbers: Sequence[tuple[str, str]]) -> str:
    return (
        '<div class="tiles">' + "".join(f"<div><b>{html.escape(value)}</b>{html.escape(name)}</div>" for name, value in numbers) + "</div>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[int] = (), wrap: Iterable[int] = ()) -> str:
    """Numbers stand right; the first column and those of `left` stand left, and so do those of `wrap`, which may break lines. Where the
    screen is narrow it scrolls by itself."""
    classes = {**dict.fromkeys(left, ' class="t"'), **dict.fromkeys(wrap, ' class="w"')}

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{classes.get(n, '')}>{html.escape(cell)}</{tag}>" for n, cell in enumerate(cells)) + "</tr>"

    return f'<div class="wide"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def bars(rows: Iterable[tuple[str, float, str, str]]) -> str:
    """(name, value, value as text, remark): a bar each, the longest as wide as there is room."""
    rows = list(rows)
    most = max((value for _, value, _, _ in rows), default=0) or 1
    drawn = (
        f'<span class="l">{html.escape(name)}</span><span><i style="width:{100 * value / most:.2f}%"></i></span>'
        f'<span class="n">{html.escape(shown)}</span><span class="m">{html.escape(remark)}</span>'
        for name, value, shown, remark in rows
    )
    return f'<div class="bars">{"".join(drawn)}</div>'


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
