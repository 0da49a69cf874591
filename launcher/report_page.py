"""The HTML of a report: style, tables, sections that open."""

from __future__ import annotations

import html
from collections.abc import Sequence

_STYLE = """
:root{--ink:#1d2530;--dim:#667;--line:#dde1e6;--paper:#fff;--soft:#f5f7f9;--c0:#2a6fbb;--c1:#d1602a;--c2:#2c8a4b}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7eb;--dim:#9aa3ad;--line:#39414a;--paper:#15191e;--soft:#1e242b;--c0:#6ba8e8;--c1:#f0905a;--c2:#6cc28a}}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:1.5rem auto;padding:0 1rem;color:var(--ink);background:var(--paper)}
h1{margin:0}h2,summary{font-size:1.15rem;font-weight:600;margin:1.6rem 0 .4rem}summary{cursor:pointer}
.state{color:var(--dim);margin:.2rem 0 1rem;white-space:pre-wrap}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem}.tiles div{background:var(--soft);padding:.45rem .8rem;border-radius:.4rem}
.tiles b{display:block;font-size:1.15rem;font-variant-numeric:tabular-nums}.tiles span{color:var(--dim);font-size:.85rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{color:var(--dim);font-weight:normal;white-space:nowrap}td.n{text-align:right}td{overflow-wrap:break-word;max-width:40rem}
pre{background:var(--soft);padding:.8rem;overflow-x:auto;white-space:pre-wrap}
input[name=axis]{margin:0 .3rem 0 0}label{margin-right:1.2rem}
.charts{display:none;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:.5rem 1.5rem;margin-top:.6rem}
#x-step:checked~.by-step,#x-tokens:checked~.by-tokens,#x-time:checked~.by-time{display:grid}
figure{margin:0}figcaption{font-weight:600}.key{font-weight:normal;margin-left:.8rem}.key::before{content:"";display:inline-block;width:.8rem;
height:.2rem;margin-right:.3rem;vertical-align:middle;background:var(--k)}
svg{width:100%;max-width:44rem;height:auto}.note{font-weight:normal;color:var(--dim);margin-left:.8rem}svg text{font-size:12px;fill:var(--dim)}.grid{stroke:var(--line)}
.mark{stroke:var(--dim);stroke-dasharray:3 3;stroke-width:1.5}
polyline{fill:none;stroke:var(--k);stroke-linejoin:round}.line{stroke-width:1.7}.faint{stroke-width:1;opacity:.35}circle{fill:var(--k)}
.c0{--k:var(--c0)}.c1{--k:var(--c1)}.c2{--k:var(--c2)}
"""


def page(title: str, state: str, sections: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = f'<h1>{html.escape(title)}</h1><p class="state">{html.escape(state)}</p>{"".join(sections)}'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """A few numbers to see first."""
    return f'<div class="tiles">{"".join(f"<div><span>{html.escape(name)}</span><b>{html.escape(value)}</b></div>" for name, value in values)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    cells = ["".join(f"<td{_numeric(cell)}>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="scroll"><table><tr>{names}</tr>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    cells = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows]
    return f'<div class="scroll"><table>{"".join(cells)}</table></div>'


def details(title: str, inside: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{html.escape(title)}</summary>{inside}</details>"


def _numeric(cell: str) -> str:
    return ' class="n"' if cell[:1].isdigit() and not cell.strip("0123456789.,%kMGT") else ""
