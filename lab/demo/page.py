"""The frame of the demos' reports: one HTML file that needs no other file, light and dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from penstock.axis import text_width

_STYLE = """
:root { --ground:#fbfcfd; --card:#fff; --ink:#16222e; --soft:#5b6b7a; --line:#dde4ea;
  --plain:#a9b4bf; --cold:#d98a3d; --pool:#0b7285; --local:#74b816; --bad:#c92a2a; --good:#2b8a3e }
@media (prefers-color-scheme: dark) {
  :root { --ground:#10171e; --card:#172029; --ink:#e6edf3; --soft:#93a4b3; --line:#2b3742;
    --plain:#66727e; --cold:#f0a45c; --pool:#3bc9db; --local:#94d82d;
    --bad:#ff8787; --good:#69db7c }
}
* { box-sizing:border-box }
body { margin:0; background:var(--ground); color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:1040px; margin:0 auto; padding:40px 24px 64px }
h1 { font-size:28px; line-height:1.2; margin:0 0 6px; letter-spacing:-.01em }
h2 { font-size:18px; margin:40px 0 4px }
p { margin:0 0 12px; max-width:74ch }
.soft, figcaption { color:var(--soft); font-size:14px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(190px,1fr)); gap:14px;
  margin:26px 0 8px }
.tile, figure { background:var(--card); border:1px solid var(--line); border-radius:10px }
.tile { padding:16px 18px }
.tile b { display:block; font-size:30px; line-height:1.15; letter-spacing:-.02em;
  font-variant-numeric:tabular-nums }
.tile.good b { color:var(--good) } .tile.bad b, .tile.bad strong { color:var(--bad) }
figure { margin:12px 0 0; padding:16px 18px 12px; overflow-x:auto }
figcaption { margin-top:6px }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; font-size:15px }
.wide { overflow-x:auto; margin-top:14px }
th, td { text-align:right; padding:7px 10px; border-bottom:1px solid var(--line);
  white-space:nowrap }
th { color:var(--soft); font-weight:500; font-size:13px; vertical-align:bottom }
th:first-child, td:first-child { text-align:left; padding-left:0 }
tr.total td { font-weight:600 }
td.bad { color:var(--bad); font-weight:600 }
details { margin-top:28px } summary { cursor:pointer; font-weight:600 }
.key { display:inline-flex; align-items:center; gap:7px; margin-right:18px; font-size:14px }
.key i { width:11px; height:11px; border-radius:3px; display:inline-block }
i.plain { background:var(--plain) } i.cold { background:var(--cold) }
i.pool { background:var(--pool) } i.local { background:var(--local) }
svg { display:block; width:100%; height:auto; min-width:640px }
svg text { fill:var(--soft); font:12px system-ui,sans-serif; font-variant-numeric:tabular-nums }
svg .grid { stroke:var(--line) } svg .stem { stroke:var(--line); stroke-width:2 }
svg .plain { fill:var(--plain) } svg .cold { fill:var(--cold) }
svg .pool { fill:var(--pool) } svg .local { fill:var(--local) }
svg .cloud { fill:none; stroke-width:4; stroke-linecap:round; stroke-opacity:.55 }
svg .cloud.plain { stroke:var(--plain) } svg .cloud.cold { stroke:var(--cold) }
svg .cloud.pool { stroke:var(--pool) }
svg text.value { fill:var(--ink); font-weight:600 }
dl { display:grid; grid-template-columns:max-content 1fr; gap:3px 18px; font-size:14px;
  margin:8px 0 }
dt { color:var(--soft) } dd { margin:0; overflow-wrap:anywhere }
"""


_PICTURE_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5b6b7a}text.value{fill:#16222e;font-weight:600}"
    ".grid{stroke:#dde4ea}rect.plain{fill:#a9b4bf}rect.pool{fill:#0b7285}"
    ".cloud{fill:none;stroke-width:4;stroke-linecap:round;stroke-opacity:.55}"
    ".cloud.plain{stroke:#a9b4bf}.cloud.pool{stroke:#0b7285}"
)


def page(title: str, body: str) -> str:
    """A whole page. `body` is HTML; `title` is text."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def tile(value: str, text: str, kind: str = "") -> str:
    """A figure in large print, with what it means. `kind` is "good", "bad" or nothing."""
    return f"<div class='tile {kind}'><b>{value}</b><span class='soft'>{escape(text)}</span></div>"


def keys(*entries: tuple[str, str]) -> str:
    """A chart's key: colours by their class, and what they stand for."""
    return "".join(
        f"<span class='key'><i class='{kind}'></i>{escape(text)}</span>" for kind, text in entries
    )


def failures(texts: tuple[str, ...]) -> str:
    """Why a demo failed."""
    return "".join(f"<p class='tile bad'><strong>{escape(text)}</strong></p>" for text in texts)


def facts(entries: Mapping[str, str]) -> str:
    """Names and values, such as the versions of programs."""
    return "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in entries.items()
    )


def ms(seconds: float) -> str:
    """Seconds as whole milliseconds."""
    return f"{seconds * 1e3:,.0f}"


def picture(chart: str, kinds: Sequence[tuple[str, str]]) -> str:
    """A chart as a file of its own, with its key above: colours by their class, and their names."""
    head, _, marks = chart.partition(">")
    _, _, width, height = map(float, re.findall(r"[\d.]+", head.partition("viewBox")[2])[:4])
    left, key = 84.0, []
    for kind, text in kinds:
        key.append(
            f'<rect class="{kind}" x="{left:.0f}" y="-18" width="11" height="11" rx="3"/>'
            f'<text class="value" x="{left + 18:.0f}" y="-8">{escape(text)}</text>'
        )
        left += 18 + text_width(text, 12, bold=True) + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -28 {width:.0f} {height + 28:.0f}">'
        f'<style>{_PICTURE_STYLE}</style><rect y="-28" width="100%" height="100%" fill="#fff"/>'
        f"{''.join(key)}{marks}\n"
    )
