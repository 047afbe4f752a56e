"""The pictures of the docs: nothing runs out of its box, and each is what its command draws."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benches.shared import load_policy_plot
from penstock.cli import main
from scripts.docs import dashboard, top
from tests.pictures import faults
from tests.plan.test_kv import LLAMA

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
GUIDE = ROOT / "docs/guides/asymmetric-pipelines.md"


# A terminal's letters all have one width, which this does not know.
@pytest.mark.parametrize(
    "picture",
    sorted(path for path in PICTURES.iterdir() if path.name != "top.svg"),
    ids=lambda path: path.name,
)
def test_nothing_in_it_crosses_anything(picture: Path) -> None:
    assert faults(picture.read_text()) == []


def test_the_plan_is_the_one_of_the_guides_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = re.search(r"^penstock (plan \S+ --pp .*)$", GUIDE.read_text(), re.MULTILINE)
    assert command is not None
    verb, _, *options = shlex.split(command[1])
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    drawn = tmp_path / "plan.svg"
    assert main([verb, str(tmp_path), *options, "--plot", str(drawn)]) == 0, capsys.readouterr()
    assert drawn.read_text() == (PICTURES / "plan.svg").read_text(), (
        f"draw it anew: penstock {command[1]} --plot docs/pictures/plan.svg"
    )


def test_the_sweep_of_networks_is_the_recorded_one() -> None:
    recorded = json.loads((ROOT / "benches/results/load_policy.json").read_text())
    assert load_policy_plot.draw(recorded["rows"]) == (PICTURES / "load-policy.svg").read_text()


def test_the_dashboard_and_top_are_the_recorded_demo_s() -> None:
    recorded = json.loads(dashboard.RECORDED.read_text())
    drawn = dashboard.draw(json.loads(dashboard.DASHBOARD.read_text()), recorded)
    assert drawn == (PICTURES / "dashboard.svg").read_text(), (
        "draw it anew: python -m scripts.docs.dashboard"
    )
    shown = top.draw(recorded["top"])
    assert shown == (PICTURES / "top.svg").read_text(), "draw it anew: python -m scripts.docs.top"
    assert "http" not in shown.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ('<text x="90" y="40">words</text>', "'words' reaches beyond the picture"),
        ('<text x="20" y="40">a</text><text x="22" y="40">b</text>', "'a' and 'b'"),
        ('<text x="20" y="40">a</text><circle cx="24" cy="36" r="2"/>', "'a' and a dot"),
        (
            '<rect x="20" y="20" width="30" height="40"/><text x="25" y="40">words</text>',
            "'words' crosses the edge of a box",
        ),
    ],
)
def test_what_is_looked_for_is_found(marks: str, said: str) -> None:
    assert faults(f'<svg viewBox="0 0 100 100">{marks}</svg>') == [said]
