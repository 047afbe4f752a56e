"""Writes the KV that a trained model computes on text that it has not learnt.

`python -m benches.trained_kv FOLDER` writes a file for each element type, `FOLDER/kv.bf16` and so
on, for `benches.compress --kv`. Elements lie as in values: block, layer, K and V, head,
token. The model computes in bf16, for fp16 in that. The fp8 types are cast from bf16, with scale 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.trained import text
from benches.trained.recipe import Recipe, stream
from benches.trained.train import trained

BLOCK = 16
CONTEXT = 512


def main() -> None:
    """Computes and writes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(prog="benches.trained_kv", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=16, help=f"of {CONTEXT} tokens each")
    args = report.begin(parser)
    torch.set_num_threads(1)
    source = text.read()
    folder = trained(Recipe("llama"), source).folder
    tokens = stream(AutoTokenizer.from_pretrained(folder), source.held_out)
    prompts = torch.tensor(tokens[: args.prompts * CONTEXT]).view(-1, CONTEXT)
    args.folder.mkdir(parents=True, exist_ok=True)

    def kv(dtype: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        with torch.no_grad():
            layers = model(prompts, use_cache=True).past_key_values.layers
        pairs = [torch.stack([layer.keys, layer.values]) for layer in layers]
        # Layer, K or V, prompt, head, block, token, element.
        every = torch.stack(pairs).unflatten(4, (-1, BLOCK))
        return every.permute(2, 4, 0, 1, 3, 5, 6).contiguous()

    bf16 = kv(torch.bfloat16)
    written: dict[str, int] = {}
    for name, values in (
        ("bf16", bf16),
        ("fp16", kv(torch.float16)),
        ("fp8_e4m3", bf16.to(torch.float8_e4m3fn)),
        ("fp8_e5m2", bf16.to(torch.float8_e5m2)),
    ):
        path = args.folder / f"kv.{name}"
        path.write_bytes(values.view(torch.uint8).numpy().tobytes())
        written[path.name] = path.stat().st_size
    rows = [[name, f"{size:,}"] for name, size in written.items()]
    report.finish(args, report.table(["file", "bytes"], rows), {"bytes": written})


if __name__ == "__main__":
    main()
