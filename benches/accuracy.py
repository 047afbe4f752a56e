"""Do answers stay what they are when the KV of their prompts comes from the pool?

On small models that have learnt a text (`benches/trained`). Each engine answers the same prompts
cold, from vLLM's own prefix cache, and from the pool: questions that lm-eval puts, and
conversations of several turns. Run it as ``python -m benches.accuracy``, after
``benches/setup_accuracy.sh``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.report import progress
from benches.trained import text
from benches.trained.conditions import COLD, FORCED, LOADED, OWN, Cold, Loaded, Own, settle
from benches.trained.outcomes import Asked, Outcome, Turn, compare, figures, outcome, said
from benches.trained.questions import ANSWER_TOKENS, conversations, questions
from benches.trained.recipe import KINDS, Recipe
from benches.trained.train import Trained, trained
from lab.engines.forks import Fork
from lab.engines.node import Node, StartError

DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_e4m3": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
}
"""Options of engines, by the KV's data type."""
LAYOUTS = ("LBHNC", "BLHNC")
BLOCK = 128
"""Tokens of a block. Unless told, vLLM on CPUs cuts prompts of hybrid models elsewhere."""
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "max_model_len": 1024,
    # Room for all prompts of a condition: an own hit has to come from the own cache.
    "kv_cache_memory_bytes": 512 << 20,
    # vLLM's CPU kernel rotates the wrong heads of an LFM2's queries and keys, which have a
    # dimension for heads: what it computes depends on how many tokens a step has.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "launch": Fork,
    **FORCED,
}
HITS, OWN_HITS = "loaded_against_own_hit", "own_hit_against_cold"


def three(key: str, digits: int) -> str:
    """A cell with a figure under each condition."""
    return " / ".join(f"{{conditions[{each}][{key}]:.{digits}f}}" for each in (COLD, OWN, LOADED))


COLUMNS = [
    ("model", "{model}"),
    ("dtype", "{dtype}"),
    ("layout", "{layout}"),
    ("score: cold / own hit / loaded", three("score", 3)),
    ("loss", three("loss", 4)),
    ("loss of answers", three("loss_of_answers", 4)),
    ("answers: loaded, own hit differ", f"{{{HITS}[answers_differ]}} of {{{HITS}[answers]}}"),
    ("in a bit", "{in_a_bit}"),
    ("answers: own hit, cold differ", f"{{{OWN_HITS}[answers_differ]}} of {{{OWN_HITS}[answers]}}"),
    (
        "tokens cached: from the pool",
        f"{{loaded_tokens:,}} of {{conditions[{LOADED}][tokens_cached]:,}}",
    ),
]


def pooled(
    model: Trained, dtype: str, layout: str, asked: Asked, folder: Path
) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """One engine has own hits, and stores; it never loads. Another has the same from the pool."""
    name = f"{model.facts['recipe']['kind']}-{dtype}-{layout}"
    # On a busy machine, too, a prompt of a pool comes from the pool.
    patience = {"penstock.lookup_timeout": 20.0, "penstock.load_timeout": 30.0}
    options = ENGINE | {
        "pool": f"file://{folder}/{name}?size=4GiB",
        "settings": {"penstock.kv_layout": layout, **patience},
        **DTYPES[dtype],
    }
    with Node(model.folder, folder / f"{name}-own.log", role="kv_producer", **options) as node:
        assert f"KV layout {layout}" in node.log.read_text()
        own = Own(node)
        found = {OWN: outcome(own, asked, None)}
        assert own.loaded() == 0, "an own hit came from the pool"
        settle(node)
    with Node(model.folder, folder / f"{name}-loaded.log", role="kv_consumer", **options) as node:
        assert f"KV layout {layout}" in node.log.read_text()
        loaded = Loaded(node)
        found[LOADED] = outcome(loaded, asked, found[OWN].turns)
        counters = node.counters()
        return found, {
            "loaded_tokens": loaded.loaded(),
            "loaded_bytes": int(counters.get("loaded_bytes", 0)),
            "load_failed_blocks": int(counters.get("load_failed_blocks", 0)),
        }


def cold(model: Trained, dtype: str, asked: Asked, turns: Sequence[Turn], folder: Path) -> Outcome:
    """vLLM alone, which computes every prompt."""
    log = folder / f"{model.facts['recipe']['kind']}-{dtype}-cold.log"
    with Node(model.folder, log, enable_prefix_caching=False, **DTYPES[dtype], **ENGINE) as node:
        return outcome(Cold(node), asked, turns)


def measure(model: Trained, asked: Asked, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A model in every dtype and layout."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        for dtype in args.dtypes:
            computed: Outcome | None = None
            for layout in args.layouts:
                row = {"model": model.facts["recipe"]["kind"], "dtype": dtype, "layout": layout}
                progress(" ".join(row.values()))
                try:
                    found, loads = pooled(model, dtype, layout, asked, folder)
                except StartError as error:
                    rows.append(row | {"failure": report.cause(str(error))})
                    progress(f"  {rows[-1]['failure']}")
                    continue
                led = found[OWN].turns
                if computed is None or prompts(computed.turns) != prompts(led):
                    computed = cold(model, dtype, asked, led, folder)
                rows.append(row | loads | figures_of(found | {COLD: computed}, asked))
    return rows


def prompts(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """What was asked in conversations."""
    return [turn.prompt for turn in turns]


def figures_of(found: dict[str, Outcome], asked: Asked) -> dict[str, Any]:
    """What a row shows of all conditions."""
    return {
        "conditions": {each: figures(found[each]) for each in (COLD, OWN, LOADED)},
        HITS: compare(found[LOADED], found[OWN]),
        OWN_HITS: compare(found[OWN], found[COLD]),
        "lm_eval": found[OWN].score.version,
        "said": said(asked, found[OWN].turns),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each engine with a pool, and why an engine is missing."""
    bits = ("answers_differ_in_a_bit", "scored_differ_in_a_bit")
    lines = [
        row | {"in_a_bit": sum(row[HITS][each] for each in bits)} if HITS in row else row
        for row in rows
    ]
    missing = [
        f"{row['model']}, {row['dtype']}, {row['layout']}: {row['failure']}"
        for row in rows
        if "failure" in row
    ]
    return "\n".join([report.listing(lines, COLUMNS), *missing])


def main() -> None:
    """Trains what is missing, measures, prints tables and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.accuracy", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--questions", type=int, default=75)
    parser.add_argument("--conversations", type=int, default=125)
    parser.add_argument("--turns", type=int, default=4, help="answers of a conversation")
    parser.add_argument("--together", type=int, default=25, help="requests at a time")
    parser.add_argument("--threads", type=int, default=1, help="of the training, where it is due")
    args = report.begin(parser)
    source = text.read()
    rows: list[dict[str, Any]] = []
    models = {}
    for kind in args.models:
        from transformers import AutoTokenizer

        model = trained(Recipe(kind), source, args.threads)
        models[kind] = model.facts
        tokenizer = AutoTokenizer.from_pretrained(model.folder)
        asked = Asked(
            tokenizer,
            questions(tokenizer, source.held_out, args.questions),
            conversations(tokenizer, source.held_out, args.conversations, args.turns),
            args.together,
        )
        rows += measure(model, asked, args)
    settings = {
        "questions": args.questions,
        "conversations": args.conversations,
        "turns": args.turns,
        "together": args.together,
        "answer_tokens": ANSWER_TOKENS,
    }
    report.finish(args, table(rows), {**settings, "models": models, "rows": rows})


if __name__ == "__main__":
    main()
