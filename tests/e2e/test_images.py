"""Prompts with images: the same image hits, another one never does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Answer, Node, StartError
from lab.models import images
from lab.models.images import AROUND, FIRST_WORD, IMAGE_TOKENS, PLACEHOLDER
from tests.e2e.conftest import tokens

pytestmark = pytest.mark.e2e

BLOCK = 32
BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK
"""Layers, K and V, KV heads, head size, bytes of float32, tokens."""
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "block_size": BLOCK,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "limit_mm_per_prompt": {"image": 2},
}
ONE = IMAGE_TOKENS + AROUND
"""Tokens of an image."""
WORDS, QUESTION = ([FIRST_WORD + t % 200 for t in tokens(n, seed=n)] for n in (2 * BLOCK + 6, 30))


@dataclass(frozen=True)
class Prompt:
    """Images, and a question about them."""

    seen: tuple[int, ...]
    before: bool = False
    """Whether text comes first."""

    @property
    def tokens(self) -> list[int]:
        return [*WORDS * self.before, *[PLACEHOLDER] * len(self.seen), *QUESTION]

    def ask(self, node: Node, **options: Any) -> Answer:
        return node.ask(self.tokens, images=self.seen, **options)


STORED = (Prompt((1, 2)), Prompt((2, 1)), Prompt((3,), before=True))
"""What the first process computes."""
ASKED = {
    # All but the last token is there; half a block is not.
    Prompt((1, 2)): (2 * ONE + len(QUESTION) - 1) // BLOCK * BLOCK,
    Prompt((2, 1)): (2 * ONE + len(QUESTION) - 1) // BLOCK * BLOCK,
    # The first image alone, as far as its blocks hold nothing of the second.
    Prompt((1, 3)): ONE // BLOCK * BLOCK,
    Prompt((2, 2)): ONE // BLOCK * BLOCK,
    Prompt((3, 1)): 0,
    Prompt((3,), before=True): (len(WORDS) + ONE + len(QUESTION) - 1) // BLOCK * BLOCK,
    # The text before the image.
    Prompt((4,), before=True): len(WORDS) // BLOCK * BLOCK,
}
"""What the second process is asked, and the tokens that it finds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images.idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def own_hits(model: Path, start: Callable[..., Node]) -> dict[Prompt, Answer]:
    """What vLLM without Penstock says to each prompt, if its own cache has what was stored."""
    said = {}
    with start(model, **OPTIONS) as node:
        for prompt in ASKED:
            node.forget()
            for stored in STORED:
                stored.ask(node)
            said[prompt] = prompt.ask(node)
    return said


@pytest.fixture(scope="module")
def pool(model: Path, start: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pool that has what another process was asked."""
    url = f"file://{tmp_path_factory.mktemp('pool')}?size=1GiB"
    with start(model, pool=url, **OPTIONS) as node:
        for prompt in STORED:
            prompt.ask(node)
        node.wait_for("stored_blocks", sum(ASKED[prompt] // BLOCK for prompt in STORED))
    return url


def test_the_same_image_hits_and_no_other(
    model: Path, pool: str, own_hits: dict[Prompt, Answer], start: Callable[..., Node]
) -> None:
    assert len({answer.text for answer in own_hits.values()}) == len(ASKED), "images matter"
    with start(model, pool=pool, **OPTIONS) as node:
        for prompt, expected in ASKED.items():
            node.forget()
            answer = prompt.ask(node)
            assert answer.cached == own_hits[prompt].cached == expected, prompt
            assert answer.text == own_hits[prompt].text, prompt
        counters = node.counters()
        assert counters["loaded_tokens"] == sum(ASKED.values())
        assert counters.get("load_failed_blocks", 0) == 0


def _other_means(model: Path) -> None:
    """Has the processor take away another mean."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        content = json.loads((model / name).read_text())
        content.get("image_processor", content)["image_mean"] = [0.1] * 3
        (model / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (_other_means, {}),
        (lambda model: None, {"mm_processor_kwargs": {"do_normalize": False}}),
        (lambda model: None, {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}),
    ],
    ids=["file", "option", "reading"],
)
def test_an_image_that_was_processed_otherwise_is_never_loaded(
    change: Callable[[Path], None],
    options: dict[str, Any],
    model: Path,
    pool: str,
    start: Callable[..., Node],
    tmp_path: Path,
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "model"))
    change(other)
    with start(other, pool=pool, **OPTIONS | options) as node:
        assert STORED[0].ask(node).cached == 0
        assert node.counters()["lookups"] >= 1


def test_a_hint_without_images_brings_the_text_before_them(
    model: Path, pool: str, own_hits: dict[Prompt, Answer], start: Callable[..., Node]
) -> None:
    """Token ids do not tell what an image shows."""
    prompt = Prompt((3,), before=True)
    expanded = [*WORDS, *[PLACEHOLDER] * ONE, *QUESTION]
    settings = {"penstock.host_tier": True}
    with start(model, pool=pool, settings=settings, **OPTIONS) as node:
        node.ask(QUESTION, params={"penstock.prefetch": expanded})
        text = len(WORDS) // BLOCK
        node.wait_for("prefetched_bytes", text * BLOCK_BYTES)
        answer = prompt.ask(node)
        assert answer.cached == ASKED[prompt]
        assert answer.text == own_hits[prompt].text
        counters = node.counters()
        assert counters["prefetched_bytes"] == text * BLOCK_BYTES
        assert counters["loaded_bytes"] == (ASKED[prompt] // BLOCK - text) * BLOCK_BYTES


def test_what_one_prompt_lets_go_is_not_that_of_another_image(
    model: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/pool?size=1GiB"
    kept, gone = Prompt((1, 2)), Prompt((1, 3))
    with start(model, pool=url, **OPTIONS) as node:
        said = kept.ask(node), gone.ask(node)
        node.wait_for("stored_blocks", 5 + 3)
        # All after the first image; its blocks are those of both.
        gone.ask(node, params={"penstock.let_go": ASKED[gone]})
        node.wait_for("let_go_blocks", 3)
        for prompt, before, cached in zip((kept, gone), said, (5, 2), strict=True):
            node.forget()
            answer = prompt.ask(node)
            assert answer.cached == cached * BLOCK
            assert answer.tokens == before.tokens


def test_a_name_that_a_client_gives_is_believed(
    model: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    """That is vLLM's rule, and the pool's too: who names images can name two alike."""
    url = f"file://{tmp_path}/pool?size=1GiB"
    prompt = Prompt((1, 2))
    with start(model, pool=url, **OPTIONS) as node:
        prompt.ask(node, image_names=("red", "blue"))
        node.wait_for("stored_blocks", 5)
    with start(model, pool=url, **OPTIONS) as node:
        assert prompt.ask(node).cached == 0
        others = Prompt((3, 4))
        assert others.ask(node, image_names=("red", "green")).cached == ONE // BLOCK * BLOCK
        assert others.ask(node, image_names=("red", "blue")).cached == ASKED[prompt]


class Extension:
    """What an operator adds to vLLM's workers."""

    def see_otherwise(self) -> None:
        """Changes the weights that look at images."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        named = model.named_parameters()
        [weight] = (each for name, each in named if name.endswith("patch_embedding.weight"))
        weight.data.mul_(-1)


@pytest.mark.parametrize("forgets", [False, True], ids=["kept", "forgotten"])
def test_what_old_weights_made_of_an_image_never_gets_under_the_new_ones(
    forgets: bool, model: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    """vLLM keeps what it made of images, and forgets it by another call than its blocks."""
    options = OPTIONS | {"worker_extension_cls": f"{__name__}.Extension"}
    prompt = STORED[0]
    with start(model, **options) as node:
        node.call("see_otherwise")
        right = prompt.ask(node).text
    with start(model, pool=f"file://{tmp_path}/pool?size=1GiB", **options) as node:
        prompt.ask(node)
        node.wait_for("stored_blocks", 5)
        node.call("see_otherwise")
        if forgets:
            node.forget_images()
        assert node.reset(pool=True)
        answer = prompt.ask(node)
        assert answer.cached == 0
        assert (answer.text == right) == forgets
        # Stores are made in turn.
        node.ask([*WORDS, *QUESTION])
        text = (len(WORDS) + len(QUESTION)) // BLOCK
        stored = 5 + 5 * forgets + text
        node.wait_for("stored_blocks", stored)
        assert node.counters()["stored_blocks"] == stored
        if forgets:
            node.forget()
            answer = prompt.ask(node)
            assert (answer.cached, answer.text) == (ASKED[prompt], right)


def test_images_that_vllm_only_counts_are_refused(
    model: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/pool?size=1GiB"
    nameless = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    with (
        pytest.raises(StartError, match="images without names"),
        start(model, pool=url, **OPTIONS | nameless),
    ):
        pass
