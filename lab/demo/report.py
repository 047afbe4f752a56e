"""The demo's report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lab.demo.figures import Figures, Row
from lab.demo.page import facts, failures, keys, ms, page, tile
from lab.demo.replay import Comparison, Situation
from lab.latency import Latency
from penstock.chart import Bar, Column, Dot, dots, grouped_bars, stacked_columns

_WITHOUT = "without Penstock"

_CLASS = {
    Situation.COLD: "cold",
    Situation.OTHER_NODE: "pool",
    Situation.SAME_NODE: "local",
}

_SOURCES = (("cold", "computed"), ("pool", "loaded from the pool"), ("local", "server's own cache"))


def render(figures: Figures) -> str:
    """The report as HTML."""
    cuts = "".join(f"<li>{escape(cut)}</li>" for cut in figures.cuts)
    body = f"""<h1>{_headline(figures)}</h1>
<p class="soft">Two vLLM servers over one pool, {escape(figures.workload)}; each conversation
changes servers with every request. Each prompt also went, in turn, to a vLLM server without
Penstock and without a prefix cache.</p>
{failures(figures.failures)}
<div class="tiles">{"".join(_tiles(figures))}</div>
{f"<ul class='soft'>{cuts}</ul>" if cuts else ""}
<h2>Time to first token</h2>
<figure>{_latency_chart(figures.rows)}
<figcaption>Median of the requests in each situation; the line and the second number reach to the
99th percentile.</figcaption></figure>
{_summary_table(figures)}
<h2>Request by request</h2>
<figure>{keys(("plain", _WITHOUT), *((_CLASS[s], s.value) for s in Situation))}
{_request_chart(figures.comparisons)}
<figcaption>Time to first token in the order of sending. Each stem joins a request to the same
prompt without Penstock.</figcaption></figure>
<h2>Where the prompts' KV came from</h2>
<figure>{keys(*_SOURCES)}
{_source_chart(figures.comparisons)}
<figcaption>Prompt tokens of each request, in the order of sending.</figcaption></figure>
<details><summary>All requests</summary>{_request_table(figures.comparisons)}</details>
<details open><summary>How it was run</summary><dl>{_environment(figures)}</dl></details>"""
    return page("Penstock demo", body)


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
            tile(
                f"{ms(row.penstock.p50)} ms",
                f"to the first token on the other server; {ms(row.recomputed.p50)} ms {_WITHOUT}",
            )
        )
    tiles.append(
        tile(
            f"{equal} / {len(figures.comparisons)}",
            f"outputs equal, token for token, to those {_WITHOUT}",
            "bad" if figures.differing else "good",
        )
    )
    tiles.append(tile(f"{figures.moved.loaded_tokens:,}", "tokens loaded from the pool"))
    tiles.append(
        tile(
            _mib(figures.moved.loaded_bytes),
            f"of KV cache loaded, {_mib(figures.moved.stored_bytes)} stored",
        )
    )
    if figures.hits is not None:
        declined, late = figures.hits.declined, figures.hits.late
        tiles.append(
            tile(
                f"{figures.hits.found:.1%}",
                "of the prompts' blocks were not computed; "
                f"{figures.hits.expected:.1%} by penstock simulate"
                + (f", {declined:.1%} not worth a load" if declined else "")
                + (f", {late:.1%} since a load broke off" if late else ""),
            )
        )
    return tiles


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
                f"{_label(each)}: {ms(each.exchange.answer.first_token)} ms, "
                f"{ms(each.reference.first_token)} ms {_WITHOUT}",
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
            f"<tr><td>{keys((_CLASS[row.situation], row.situation.value))}</td>"
            f"<td>{row.requests}</td><td>{row.prompt_tokens:,}</td>"
            f"<td>{row.loaded_tokens:,}</td><td>{row.local_tokens:,}</td>"
            f"<td>{ms(row.penstock.p50)}</td><td>{ms(row.penstock.p99)}</td>"
            f"<td>{ms(row.recomputed.p50)}</td><td>{ms(row.recomputed.p99)}</td></tr>"
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
            f"<td>{ms(exchange.answer.first_token)}</td><td>{ms(each.reference.first_token)}</td>"
            f"{verdict}</tr>"
        )
    return (
        "<div class='wide'><table><thead><tr><th></th><th>server</th><th>situation</th>"
        "<th>prompt</th><th>from pool</th><th>own cache</th><th>Penstock, ms</th>"
        "<th>recomputed, ms</th><th>output</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _environment(figures: Figures) -> str:
    return facts({"pool": figures.pool, **figures.environment})


def _label(comparison: Comparison) -> str:
    exchange = comparison.exchange
    return f"conversation {exchange.conversation + 1}, turn {exchange.turn + 1}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
