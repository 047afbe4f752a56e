"""`penstock doctor --model`: what does this model get from Penstock?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from penstock.cli import words
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.vllm.models import Prospect

_GUIDE = "docs/guides/models.md"
_UNKNOWN = f"nobody has tried such a model: {_GUIDE} has no row for it"


def run(model: str, wanted_layout: str, *, as_json: bool) -> int:
    """Says what the model gets. Exit status 1 if it is refused."""
    _check_folder(model)
    # Standard output is for what is said here. vLLM reads this when it is imported.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # Imported here, because only this check needs packages that vLLM installs.
    from penstock.vllm.models import describe

    try:
        found = describe(model, wanted_layout)
    except (OSError, ValueError) as error:
        if isinstance(error, PenstockError):
            raise
        # vLLM's own error has the reason, over many lines.
        raise ConfigError(f"vLLM cannot read the configuration of {model}: {error}") from None
    if as_json:
        words.print_json({"model": model, **_document(found)})
    else:
        _show(model, found)
    return 0 if found.refusal is None else 1


def _check_folder(model: str) -> None:
    """Refuses what is no model's folder, before vLLM takes it for a name and asks the network."""
    path = Path(model)
    if path.exists():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{model} has no config.json: give a model's folder, or its name")
    elif not model or model.startswith(("/", ".", "~")):
        raise ConfigError(f"there is no folder {model!r}: give a model's folder, or its name")


def _document(found: Prospect) -> dict[str, Any]:
    from penstock.vllm.families import ON_GPU, TRIED

    family, layout = found.family, found.layout
    return {
        "can_serve": found.refusal is None,
        "refusal": found.refusal,
        "kinds": found.kinds,
        "layers": family and family.layers,
        "examples": family and family.examples,
        "on_cpu": family and family.on_cpu,
        "on_gpu": ON_GPU,
        "shown_by": (family and family.shown_by) or None,
        "dtypes": found.dtypes,
        "layout": layout and layout.layout,
        "reason": layout and layout.reason,
        "tried": {} if family is None else {what: family.how(what) for what in TRIED},
        "speculation": family and family.speculation,
        "takes_images": found.takes_images,
    }


def _show(model: str, found: Prospect) -> None:
    console = words.console()
    if found.layout is not None:
        console.print(f"{model}: KV layout {found.layout.layout}: {found.layout.reason}")
    else:
        console.print(Text(f"{model}: refused: {found.refusal}"))
    table = Table.grid(padding=(0, 2))
    for name, text in _rows(found):
        table.add_row(Text(name, style="dim"), Text(text))
    console.print(table)


def _rows(found: Prospect) -> Iterator[tuple[str, str]]:
    from penstock.vllm.families import NOT_TRIED, ON_GPU, TRIED

    family = found.family
    if family is None:
        yield "layers", f"{', '.join(found.kinds)}: {_UNKNOWN}"
    else:
        yield "layers", f"{family.layers}, as {family.examples}"
        yield "on a CPU", f"{family.on_cpu}{f' ({family.shown_by})' if family.shown_by else ''}"
    if found.refusal is not None:
        return
    yield "on a GPU", ON_GPU
    yield "KV and states", f"{', '.join(found.dtypes)}, unless --dtype or --kv-cache-dtype differs"
    if family is not None:
        shown = [what for what in TRIED if family.how(what) != NOT_TRIED]
        rest = [what for what in TRIED if what not in shown]
        for what in shown:
            yield f"with {what}", family.how(what)
        yield NOT_TRIED, ", ".join(rest)
        yield "speculation", family.speculation
    yield "refused", "decode and prefill context parallelism"
    if found.takes_images:
        yield "images", "the same image hits, another one never does (tests/e2e/test_images.py)"
