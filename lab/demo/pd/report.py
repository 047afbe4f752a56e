"""The report of the demo with `--pd`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lab.demo.page import facts, failures, keys, ms, page, tile
from lab.demo.pd.figures import Figures, Row
from lab.demo.pd.load import Timed
from lab.latency import Latency
from penstock.chart import Bar, grouped_bars, scatter

_PAUSE = 0.25
"""Seconds without a token that a reader notices."""


def render(figures: Figures) -> str:
    """The report as HTML."""
    apart, round_robin = figures.apart, figures.round_robin
    body = f"""<h1>{_headline(figures)}</h1>
<p class="soft">A prefill server computes prompts, and a decode server goes on with them. The KV
goes from one to the other through the pool. The same prompts at the same times also went to two
vLLM servers without Penstock, behind round-robin. Each system had the same cores, in turn.
{figures.rate:.2f} prompts a second: {figures.prefill_share:.0%} of what the prefill server can
compute.</p>
{failures(figures.failures)}
<div class="tiles">{"".join(_tiles(figures))}</div>
<h2>Time between tokens</h2>
<figure>{keys(("pool", apart.name), ("plain", round_robin.name))}
{_gaps(figures)}
<figcaption>A dot for each token of each answer: when it came, and how long after the token before.
All rounds lie over each other. Where prompts and answers share a server, answers stand still while
a prompt is computed.</figcaption></figure>
<figure>{_bars((apart, round_robin), [row.between_tokens for row in (apart, round_robin)])}
<figcaption>Median; the line and the second number reach to the 99th percentile.</figcaption>
</figure>
<h2>Time to first token</h2>
<figure>{_bars((apart, round_robin), [row.first_token for row in (apart, round_robin)])}
<figcaption>Median; the line and the second number reach to the 99th percentile. One server computes
all prompts where they are apart, two where they are not.</figcaption></figure>
{_table((apart, round_robin))}
<details><summary>All requests</summary>{_requests(figures)}</details>
<details open><summary>How it was run</summary><dl>{_facts(figures)}</dl></details>"""
    return page("Penstock demo: prefill and decode apart", body)


def _headline(figures: Figures) -> str:
    if figures.failures:
        return "Penstock demo, prefill and decode apart: failed"
    here, there = figures.apart.between_tokens.p99, figures.round_robin.between_tokens.p99
    return (
        f"99 of 100 tokens come within {ms(here)} ms of the one before; "
        f"{ms(there)} ms where prompts share the server"
    )


def _tiles(figures: Figures) -> list[str]:
    apart, round_robin = figures.apart, figures.round_robin
    count = len(apart.answers)
    return [
        tile(
            f"{apart.share_of_long_gaps(_PAUSE):.0%}",
            f"of the answers paused for {ms(_PAUSE)} ms or more; "
            f"{round_robin.share_of_long_gaps(_PAUSE):.0%} behind round-robin",
        ),
        tile(
            f"{ms(apart.first_token.p50)} ms",
            f"to the first token; {ms(round_robin.first_token.p50)} ms behind round-robin",
        ),
        tile(
            f"{ms(apart.hand_over.p50)} ms",
            "of it on the decode server, from the prefill server's answer on",
        ),
        tile(
            f"{figures.loaded_share:.1%}",
            "of the prompts' whole blocks were loaded by the decode server; "
            f"{figures.declined_share:.1%} were computed, since that seemed faster"
            + (f", {figures.late_share:.1%} since a load broke off" if figures.late_share else ""),
        ),
        tile(
            f"{count - figures.differing} / {count}",
            "outputs equal, token for token, to those without Penstock",
            "bad" if figures.differing else "good",
        ),
    ]


def _gaps(figures: Figures) -> str:
    series = [("plain", figures.round_robin.gaps), ("pool", figures.apart.gaps)]
    return scatter(series, "ms", "s since the round began")


def _bars(rows: Sequence[Row], latencies: Sequence[Latency]) -> str:
    bars = [
        Bar(kind, each.p50 * 1e3, each.p99 * 1e3, row.name)
        for kind, row, each in zip(("pool", "plain"), rows, latencies, strict=True)
    ]
    return grouped_bars([("", bars)], unit="ms")


def _table(rows: Sequence[Row]) -> str:
    lines = "".join(
        f"<tr><td>{escape(row.name)}</td><td>{len(row.answers)}</td>"
        f"<td>{ms(row.first_token.p50)}</td><td>{ms(row.first_token.p99)}</td>"
        f"<td>{ms(row.between_tokens.p50)}</td><td>{ms(row.between_tokens.p99)}</td>"
        f"<td>{ms(row.longest_gap)}</td><td>{ms(row.whole_answer.p50)}</td></tr>"
        for row in rows
    )
    return (
        "<div class='wide'><table><thead><tr><th></th><th>requests</th>"
        "<th>first token<br>p50, ms</th><th>first token<br>p99, ms</th>"
        "<th>between tokens<br>p50, ms</th><th>between tokens<br>p99, ms</th>"
        "<th>longest<br>pause, ms</th>"
        f"<th>whole answer<br>p50, ms</th></tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _requests(figures: Figures) -> str:
    def cells(timed: Timed) -> str:
        longest = max(gap for _, gap in timed.gaps)
        return f"<td>{ms(timed.answer.first_token)}</td><td>{ms(longest)}</td>"

    lines = []
    for number, rounds in enumerate(
        zip(figures.apart.rounds, figures.round_robin.rounds, strict=True), start=1
    ):
        for here, there in zip(*rounds, strict=True):
            same = here.answer.tokens == there.answer.tokens
            verdict = "<td>equal</td>" if same else "<td class='bad'>differs</td>"
            lines.append(
                f"<tr><td>round {number}, prompt {here.prompt.number + 1}</td>"
                f"<td>{here.prompt.at:.1f}</td><td>{len(here.prompt.tokens):,}</td>"
                f"{cells(here)}{cells(there)}{verdict}</tr>"
            )
    return (
        "<div class='wide'><table><thead><tr><th></th><th>sent,<br>s</th><th>prompt</th>"
        "<th>apart: first<br>token, ms</th><th>longest<br>pause, ms</th>"
        "<th>round-robin: first<br>token, ms</th><th>longest<br>pause, ms</th><th>output</th></tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _facts(figures: Figures) -> str:
    return facts({"pool": figures.pool, **figures.environment})
