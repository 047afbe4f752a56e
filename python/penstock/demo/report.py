"""The demo's report: one HTML file that needs no other file, with a light and a dark style."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.chart import Bar, Column, Dot, dots, grouped_bars, stacked_columns
from penstock.demo.figures import Figures, Latency, Row
from penstock.demo.replay import Comparison, Situation

_WITHOUT = "without Penstock"

_CLASS = {
    Situation.COLD: "cold",
    Situation.OTHER_NODE: "pool",
    Situation.SAME_NODE: "local",
}

_SOURCES = (("cold", "computed"), ("pool", "loaded from the pool"), ("local", "server's own cache"))

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
svg text.value { fill:var(--ink); font-weight:600 }
dl { display:grid; grid-template-columns:max-content 1fr; gap:3px 18px; font-size:14px;
  margin:8px 0 }
dt { color:var(--soft) } dd { margin:0; overflow-wrap:anywhere }
"""


def render(figures: Figures) -> str:
    """The report as HTML."""
    cuts = "".join(f"<li>{escape(cut)}</li>" for cut in figures.cuts)
    failures = "".join(
        f"<p class='tile bad'><strong>{escape(text)}</strong></p>" for text in figures.failures
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Penstock demo</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{_headline(figures)}</h1>
<p class="soft">Two vLLM servers over one pool, {escape(figures.workload)}; each conversation
changes servers with every request. Each prompt also went, in turn, to a vLLM server without
Penstock and without a prefix cache.</p>
{failures}
<div class="tiles">{"".join(_tiles(figures))}</div>
{f"<ul class='soft'>{cuts}</ul>" if cuts else ""}
<h2>Time to first token</h2>
<figure>{_latency_chart(figures.rows)}
<figcaption>Median of the requests in each situation; the line and the second number reach to the
99th percentile.</figcaption></figure>
{_summary_table(figures)}
<h2>Request by request</h2>
<figure>{_keys(("plain", _WITHOUT), *((_CLASS[s], s.value) for s in Situation))}
{_request_chart(figures.comparisons)}
<figcaption>Time to first token in the order of sending. Each stem joins a request to the same
prompt without Penstock.</figcaption></figure>
<h2>Where the prompts' KV came from</h2>
<figure>{_keys(*_SOURCES)}
{_source_chart(figures.comparisons)}
<figcaption>Prompt tokens of each request, in the order of sending.</figcaption></figure>
<details><summary>All requests</summary>{_request_table(figures.comparisons)}</details>
<details open><summary>How it was run</summary><dl>{_environment(figures)}</dl></details>
</main>
</body>
</html>
"""


def _headline(figures: Figures) -> str:
    row = figures.row(Situation.OTHER_NODE)
    if row is None or figures.failures:
        return "Penstock demo" + (": failed" if figures.failures else "")
    factor = row.recomputed.p50 / row.penstock.p50
    return f"A prompt that another server has seen answers {factor:.1f}&times; sooner"


def _tiles(figures: Figures) -> list[str]:
    equal = len(figures.comparisons) - len(figures.differing)
    tiles = []
    row = figures.row(Situation.OTHER_NODE)
    if row is not None:
        tiles.append(
            _tile(
                f"{_ms(row.penstock.p50)} ms",
                f"to the first token on the other server; {_ms(row.recomputed.p50)} ms {_WITHOUT}",
            )
        )
    tiles.append(
        _tile(
            f"{equal} / {len(figures.comparisons)}",
            f"outputs equal, token for token, to those {_WITHOUT}",
            "bad" if figures.differing else "good",
        )
    )
    tiles.append(_tile(f"{figures.moved.loaded_tokens:,}", "tokens loaded from the pool"))
    tiles.append(
        _tile(
            _mib(figures.moved.loaded_bytes),
            f"of KV cache loaded, {_mib(figures.moved.stored_bytes)} stored",
        )
    )
    if figures.hits is not None:
        tiles.append(
            _tile(
                f"{figures.hits.found:.1%}",
                "of the prompts' blocks were not computed; "
                f"{figures.hits.expected:.1%} by penstock simulate",
            )
        )
    return tiles


def _tile(value: str, text: str, kind: str = "") -> str:
    return f"<div class='tile {kind}'><b>{value}</b><span class='soft'>{escape(text)}</span></div>"


def _latency_chart(rows: Sequence[Row]) -> str:
    def bar(kind: str, latency: Latency, label: str) -> Bar:
        return Bar(kind, latency.p50 * 1e3, latency.p99 * 1e3, label)

    return grouped_bars(
        [
            (
                f"{row.situation.value} ({row.requests} requests)",
                [
                    bar("plain", row.recomputed, _WITHOUT),
                    bar(_CLASS[row.situation], row.penstock, "with Penstock"),
                ],
            )
            for row in rows
        ],
        unit="ms",
    )


def _request_chart(comparisons: Sequence[Comparison]) -> str:
    return dots(
        [
            Dot(
                _CLASS[each.exchange.situation],
                each.exchange.answer.first_token * 1e3,
                each.reference.first_token * 1e3,
                f"{_label(each)}: {_ms(each.exchange.answer.first_token)} ms, "
                f"{_ms(each.reference.first_token)} ms {_WITHOUT}",
            )
            for each in comparisons
        ],
        unit="ms",
    )


def _source_chart(comparisons: Sequence[Comparison]) -> str:
    return stacked_columns(
        [
            Column(
                {
                    "local": each.exchange.local_tokens,
                    "pool": each.exchange.loaded_tokens,
                    "cold": each.exchange.computed_tokens,
                },
                f"{_label(each)}: {each.exchange.computed_tokens:,} computed, "
                f"{each.exchange.loaded_tokens:,} loaded, {each.exchange.local_tokens:,} own",
            )
            for each in comparisons
        ],
        unit="tokens",
    )


def _summary_table(figures: Figures) -> str:
    lines = []
    for row in figures.rows:
        lines.append(
            f"<tr><td>{_keys((_CLASS[row.situation], row.situation.value))}</td>"
            f"<td>{row.requests}</td><td>{row.prompt_tokens:,}</td>"
            f"<td>{row.loaded_tokens:,}</td><td>{row.local_tokens:,}</td>"
            f"<td>{_ms(row.penstock.p50)}</td><td>{_ms(row.penstock.p99)}</td>"
            f"<td>{_ms(row.recomputed.p50)}</td><td>{_ms(row.recomputed.p99)}</td></tr>"
        )
    lines.append(
        f"<tr class='total'><td>all</td><td>{len(figures.comparisons)}</td>"
        f"<td>{figures.prompt_tokens:,}</td>"
        f"<td>{figures.moved.loaded_tokens:,}</td>"
        f"<td>{sum(row.local_tokens for row in figures.rows):,}</td>"
        "<td></td><td></td><td></td><td></td></tr>"
    )
    return (
        "<div class='wide'><table><thead><tr><th></th><th>requests</th><th>prompt<br>tokens</th>"
        "<th>from<br>the pool</th><th>from own<br>cache</th><th>Penstock<br>p50, ms</th>"
        "<th>Penstock<br>p99, ms</th><th>recomputed<br>p50, ms</th>"
        f"<th>recomputed<br>p99, ms</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _request_table(comparisons: Sequence[Comparison]) -> str:
    lines = []
    for each in comparisons:
        exchange = each.exchange
        verdict = "<td>equal</td>" if each.equal else "<td class='bad'>differs</td>"
        lines.append(
            f"<tr><td>{_label(each)}</td><td>{'AB'[exchange.node]}</td>"
            f"<td>{exchange.situation.value}</td><td>{len(exchange.prompt):,}</td>"
            f"<td>{exchange.loaded_tokens:,}</td><td>{exchange.local_tokens:,}</td>"
            f"<td>{_ms(exchange.answer.first_token)}</td><td>{_ms(each.reference.first_token)}</td>"
            f"{verdict}</tr>"
        )
    return (
        "<div class='wide'><table><thead><tr><th></th><th>server</th><th>situation</th>"
        "<th>prompt</th><th>from pool</th><th>own cache</th><th>Penstock, ms</th>"
        "<th>recomputed, ms</th><th>output</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _environment(figures: Figures) -> str:
    entries = {"pool": figures.pool, **figures.environment}
    return "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in entries.items()
    )


def _keys(*entries: tuple[str, str]) -> str:
    return "".join(
        f"<span class='key'><i class='{kind}'></i>{escape(text)}</span>" for kind, text in entries
    )


def _label(comparison: Comparison) -> str:
    exchange = comparison.exchange
    return f"conversation {exchange.conversation + 1}, turn {exchange.turn + 1}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
