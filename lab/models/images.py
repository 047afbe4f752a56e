"""A small model that sees images: an Idefics3 with random weights, a tokenizer and a processor.

vLLM needs PIL for it, and not torchvision, as for most others. Every image becomes
:data:`IMAGE_TOKENS` placeholders, whatever it shows. So prompts with different images are of equal
tokens, and blocks of placeholders alone are told apart by the image's hash only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.models.saved import COMMON, save

SIDE = 128
_PATCH, _SCALE = 8, 2
IMAGE_TOKENS = (SIDE // _PATCH) ** 2 // _SCALE**2
"""Placeholders of one image."""
AROUND = 3
"""Tokens that the processor puts around them."""

_IMAGE = "<image>"
_SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
_AROUND = ["<fake_token_around_image>", _IMAGE, "<end_of_utterance>"]
_TILES = ["<global-img>", *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))]
PLACEHOLDER = len(_SPECIAL) + _AROUND.index(_IMAGE)
"""The token that stands for an image in a prompt, and then for each of its parts."""
FIRST_WORD = len(_SPECIAL) + len(_AROUND) + len(_TILES)
"""Tokens from here on are text."""


def idefics3(folder: Path, *, seed: int = 0) -> Path:
    """An Idefics3: a vision tower, and a Llama that reads what it sees."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    words = _save_tokenizer(folder)
    vision = Idefics3VisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=_PATCH,
        initializer_range=0.12,
    )
    language = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **COMMON | {"vocab_size": words},
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=language,
        image_token_id=PLACEHOLDER,
        scale_factor=_SCALE,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    _save_processor(folder)
    return save(folder, Idefics3ForConditionalGeneration, config, seed, "float32")


def _save_tokenizer(folder: Path) -> int:
    """A tokenizer of bytes. Returns the number of its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=[*_SPECIAL.values(), *_AROUND, *_TILES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def _save_processor(folder: Path) -> None:
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": SIDE},
        "do_image_splitting": False,
        "max_image_size": {"longest_edge": SIDE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "do_pad": True,
    }
    processor = {
        "processor_class": "Idefics3Processor",
        "image_seq_len": IMAGE_TOKENS,
        "image_processor": images,
    }
    for name, content in (("preprocessor", images), ("processor", processor)):
        (folder / f"{name}_config.json").write_text(json.dumps(content))


def picture(number: int) -> Any:
    """An image of random colours, the same for the same number."""
    import numpy
    from PIL import Image

    colours = numpy.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=numpy.uint8)
    return Image.fromarray(colours)
