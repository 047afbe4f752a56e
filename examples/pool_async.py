"""The pool API with asyncio: the methods of `pool.py`, awaited.

python examples/pool_async.py [URL]

URL names the pool, as `valkey://localhost:6379` does. Without it the pool is a temporary folder.
"""

import asyncio
import sys
import tempfile

import penstock
from penstock.errors import NotFound


async def main(url: str) -> None:
    """Puts values, gets them and removes them."""
    # At most `concurrency` operations run at once. The others wait their turn.
    async with penstock.open_async(url, namespace="examples", concurrency=4) as pool:
        # Operations run beside each other, and the event loop goes on.
        await asyncio.gather(*(pool.put(f"block {n}", bytes([n]) * 4) for n in range(8)))
        values = await asyncio.gather(*(pool.get(f"block {n}") for n in range(8)))
        print("get:", [value[0] for value in values])

        # Many values go together, as one operation. A miss is None.
        print("put_many:", await pool.put_many({"prompt": b"its KV", "reply": b"more KV"}))
        print("get_many:", await pool.get_many(["prompt", "reply", "another"]))

        print("removed:", await pool.remove(["prompt", "reply", *(f"block {n}" for n in range(8))]))
        try:
            await pool.get("prompt")
        except NotFound as error:
            print("miss:", error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        here = f"file://{folder}/pool?size=64MiB"
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else here))
