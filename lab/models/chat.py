"""A small Llama with random weights and a byte-level tokenizer, made on the spot.

The output of such a model means nothing. But each output token depends on every token before it, so
a wrong block of KV cache shows as a different output. That is enough for the demo. A token is a
byte of UTF-8, so the length of a text in tokens is known without a tokenizer.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

CONTEXT_TOKENS = 16_384
"""The most tokens of a prompt and its answer together."""

VOCABULARY = 512
"""Ids that the model may produce: the 256 bytes, the three marks below, and ids without a text."""

BEGIN, USER, ASSISTANT = 256, 257, 258
"""Special tokens of a conversation: its beginning, and whose turn follows."""

_MARKS = {"<|begin|>": BEGIN, "<|user|>": USER, "<|assistant|>": ASSISTANT}

_CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# With the usual 0.02, greedy output is one repeated token. That would hide errors in the KV cache.
_INITIALIZER_RANGE = 0.12

_FORMAT = "1"


def encode(text: str) -> list[int]:
    """The tokens of `text`."""
    return list(text.encode())


def model_folder(parent: Path) -> Path:
    """The model's folder under `parent`. The first call makes it, which takes seconds."""
    folder = parent / f"llama-random-{_FORMAT}"
    if (folder / "config.json").exists():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=folder.name, dir=parent))
    try:
        _save_tokenizer(scratch)
        _save_weights(scratch)
        # Put it in place whole or not at all. If two processes make the folder, one of them stays.
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|user|>",
        pad_token="<|begin|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )
    if any(fast.convert_tokens_to_ids(mark) != token for mark, token in _MARKS.items()):
        raise AssertionError("the tokenizer numbers the marks otherwise")
    fast.save_pretrained(folder)


def _byte_characters() -> list[str]:
    """The printable character for each byte value, as byte-level vocabularies write it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _save_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=_INITIALIZER_RANGE,
        bos_token_id=BEGIN,
        eos_token_id=USER,
        tie_word_embeddings=False,
        dtype="float32",
    )
    disable_progress_bar()
    torch.manual_seed(20_260_101)
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
