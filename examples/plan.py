"""The plan of KV memory for a pipeline with unequal stages. Needs no vLLM and no GPU.

python examples/plan.py
"""

from penstock.plan import config, proposal
from penstock.plan.kv import KvSizes, Serving
from penstock.plan.partition import Device, Planner

GIB = 1 << 30

# What a plan needs of Qwen2.5-32B's config.json; config.load(Path("folder")) reads a whole one.
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}

model = config.estimate(MODEL)
serving = Serving(block_size=16)
sizes = KvSizes(model, serving)

# 48 layers on the first rank, 16 on the second, 24 GiB of KV memory on both together.
plan = proposal.plan(model, sizes, serving, [48, 16], memory=24 * GIB)
for outcome in plan.outcomes:
    given = " + ".join(f"{nbytes / GIB:g}" for nbytes in outcome.split.given)
    idle = sum(outcome.split.idle) / GIB
    print(f"{outcome.name}: {given} GiB hold {outcome.tokens:,} tokens, {idle:g} GiB idle")

# Which partition holds the most tokens on a device of 80 GiB and one of 40 GiB?
reserved = proposal.reserve(model, serving)  # activations and the runtime
devices = [Device(int(nbytes * GIB * 0.92) - reserved) for nbytes in (80, 40)]
best = Planner(model, sizes, devices).best()
if best is not None:
    print(f"best partition: {best.layers} holds {sizes.tokens(best.blocks):,} tokens")
