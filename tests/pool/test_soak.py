"""A short soak, so that the long one works when it is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import soak


@pytest.mark.long
def test_a_short_soak(tmp_path: Path) -> None:
    counts = soak(8.0, 1, tmp_path)
    assert counts["hit"] > 0
    assert counts["put"] > 0
    assert any(name.startswith("fault: ") for name in counts)
