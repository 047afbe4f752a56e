"""What engines and look-up services hash to see that they hash alike. Needs nothing of vLLM."""

from __future__ import annotations

SAMPLE_BLOCKS = ((0, 255, 256, 65_535), (65_536, 151_935, 1, 2))
"""Tokens of two blocks, of every length that a number has when it is written."""

SAMPLE_SALT = "salt ü"
SAMPLE_LORA = ("name", "/path/ü", "digest")
"""Name, path, and digest of the content."""
