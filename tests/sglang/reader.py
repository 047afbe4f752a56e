"""A process that loads a prompt's pages: ``python -m tests.sglang.reader URL MODEL TOKENS``.

Prints the pages, and which modules of vLLM's connector are loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.sglang.engines import Engine, one_rank, prompt, serving

if __name__ == "__main__":
    url, model, tokens = sys.argv[1:]
    with one_rank(), serving(Path(model)), Engine(url) as engine:
        pages = engine.prefetch(prompt(int(tokens)))
    loaded = [name for name in sys.modules if name.startswith("penstock.vllm")]
    print(json.dumps([[page.hex() for page in pages], loaded]))
