"""The demo with `--pd` on the real vLLM: it measures what it says, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import psutil
import pytest

from tests import watched as watching
from tests.e2e import patient
from tests.watched import WHOLE_SECONDS, processes_in, start_demo

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


def test_a_decode_server_goes_on_with_what_a_prefill_server_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "DEMO", patient.program(tmp_path))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "report.html"
        demo = start_demo(folder, "--prompts", "6", "--report", str(page), material=("--pd",))
        out, err = demo.communicate(timeout=WHOLE_SECONDS)
        assert demo.returncode == 0, err
        figures = json.loads(out)
        assert figures["failures"] == []
        assert figures["outputs_equal"] == 6
        shares = {name: figures[f"{name}_share"] for name in ("loaded", "declined", "late")}
        assert shares == {"loaded": pytest.approx(1, abs=0.01), "declined": 0, "late": 0}
        assert figures["handovers_given_up"] == 0
        assert figures["loaded_bytes"] >= figures["loaded_tokens"] * 8 * 4 * 64 * 2 * 4
        apart, round_robin = figures["systems"].values()
        for system in (apart, round_robin):
            assert system["requests"] == 6
            assert 0 < system["between_tokens_p50"] <= system["between_tokens_max"]
            assert system["first_token_p50"] < system["whole_answer_p50"]
        assert "<svg" in page.read_text()
        left = []
        for process in processes_in(folder):
            with contextlib.suppress(psutil.Error):
                left.append(process.name())
        assert left == []
