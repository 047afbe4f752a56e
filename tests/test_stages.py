"""What runs the checks: two lanes, and stages that are left out if their inputs are the same."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.waiting import eventually
from scripts.test import passed
from scripts.test.lanes import Lanes, Outcome
from scripts.test.stages import STAGES, Stage

ROOT = Path(__file__).parents[1]


def python(name: str, program: str, **options: object) -> Stage:
    return dataclasses.replace(Stage(name, (sys.executable, "-c", program)), **options)


def run(folder: Path, *stages: Stage, whole: float = 600.0) -> dict[str, Outcome]:
    return {outcome.stage.name: outcome for outcome in Lanes(folder, whole).run(stages)}


def runs(command: str) -> bool:
    return subprocess.run(["pgrep", "-f", f"^{command}$"], capture_output=True).returncode == 0


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


# One waits for the other to have begun: neither would end if they did not run beside each other.
MEET = """
import pathlib, sys, time
pathlib.Path("{mine}").touch()
end = time.monotonic() + 120
while not pathlib.Path("{other}").exists():
    assert time.monotonic() < end
    time.sleep(0.01)
"""


def test_two_stages_run_beside_each_other(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        python("a", MEET.format(mine="a", other="b")),
        python("b", MEET.format(mine="b", other="a")),
    )
    assert {name: outcome.failure for name, outcome in found.items()} == {"a": None, "b": None}


def test_nothing_runs_beside_a_stage_that_uses_both_lanes(tmp_path: Path) -> None:
    # Each says so while it runs, and none must find another's word.
    alone = """
import os, pathlib, sys
assert os.listdir() == [], os.listdir()
pathlib.Path(sys.argv[1]).touch()
os.sched_yield()
assert os.listdir() == [sys.argv[1]], os.listdir()
pathlib.Path(sys.argv[1]).unlink()
"""
    stages = [
        Stage(f"{n}", (sys.executable, "-c", alone, f"{n}"), both_lanes=True) for n in range(6)
    ]
    assert [each.failure for each in run(tmp_path, *stages).values()] == [None] * 6


def test_a_stage_that_fails_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run(
        tmp_path,
        python("fails", "print('why it did'); raise SystemExit(3)"),
        python("passes", "print('well')"),
        Stage("is not there", ("no-such-program",)),
        python("passes, too", "pass"),
    )
    missing = found.pop("is not there").failure
    assert missing is not None
    assert "no-such-program" in missing
    assert {name: outcome.failure for name, outcome in found.items()} == {
        "fails": "status 3",
        "passes": None,
        "passes, too": None,
    }
    said = capfd.readouterr().out
    assert "== fails\nwhy it did\n" in said
    assert "== passes\nwell\n" in said


@pytest.mark.parametrize("both_lanes", [False, True])
def test_what_a_failed_stage_said_of_it_is_told_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], both_lanes: bool
) -> None:
    said = ["FAILED tests/test_x.py::test_y - assert 1 == 2", "        FAIL [ 1.2s] crate test"]
    lines = ["so far so good", "E   assert 1 == 2", "tests/test_x.py:17: AssertionError", *said]
    program = f"import sys; print({chr(10).join(lines)!r}); sys.exit(sys.argv[-1] == 'fails')"
    fails, passes = (
        dataclasses.replace(Stage(name, (sys.executable, "-c", program, name)), both_lanes=it)
        for name, it in (("fails", both_lanes), ("passes", both_lanes))
    )
    found = run(tmp_path, fails, passes)
    assert found["fails"].faults == tuple(lines[1:])
    assert found["passes"].faults == ()
    assert capfd.readouterr().out.count("so far so good\n") == 2


def test_tests_of_which_none_ran_fail(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        python("some", "print('running 0 tests\\nrunning 12 tests')", runs_some=True),
        python("none", "print('running 0 tests')", runs_some=True),
    )
    assert found["some"].failure is None
    assert found["none"].failure == "no test ran"


def test_what_hangs_is_ended_and_what_is_left_has_little_time(tmp_path: Path) -> None:
    # The command's own children hang, too.
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=None)"
    stage = Stage("hangs", ("sh", "-c", "sleep 98765 & sleep 98765"))
    found = run(tmp_path, stage, python("other", hangs), whole=0.0)
    assert found["hangs"].failure == "no time was left"
    eventually(lambda: not runs("sleep 98765"))


def test_what_a_stage_and_its_children_computed_is_told(tmp_path: Path) -> None:
    computes = """
import subprocess, sys, time
while time.process_time() < 0.2: pass
if len(sys.argv) == 1: subprocess.run([sys.executable, __file__, "child"], check=True)
"""
    (tmp_path / "computes.py").write_text(computes)
    found = run(tmp_path, Stage("computes", (sys.executable, "computes.py")))
    # The kernel counts in hundredths.
    assert found["computes"].cpu >= 0.3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_a_run_that_is_ended_ends_its_stages(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM is what a time limit sends, and SIGINT what Ctrl-C does."""
    program = """
import pathlib, sys
from scripts.test import __main__ as main
from scripts.test.stages import Stage
hangs = Stage("hangs", ("sh", "-c", "touch begun; sleep 98766 & sleep 98766"))
main.STAGES, main.ROOT = (hangs,), pathlib.Path(sys.argv[1])
sys.argv[1:] = ["all"]
sys.exit(main.main())
"""
    run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    eventually((tmp_path / "begun").exists)
    run.send_signal(number)
    assert run.wait() == 128 + number
    eventually(lambda: not runs("sleep 98766"))


def test_what_tests_said_of_being_skipped_is_told(tmp_path: Path) -> None:
    written = tmp_path / "report.xml"
    program = "open('report.xml', 'w').write('<out>skipped: no valkey-server here</out>' * 2)"
    stage = python("rust", program, report=Path("report.xml"))
    assert run(tmp_path, stage)["rust"].skipped == ("skipped: no valkey-server here",)
    assert written.exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("a = 1\n")
    (tmp_path / "src/b.py").write_text("b = 1\n")
    (tmp_path / "other.py").write_text("c = 1\n")
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git(tmp_path, "add", ".")
    return tmp_path


def test_a_digest_changes_with_every_input_and_with_nothing_else(checkout: Path) -> None:
    stage = Stage("s", ("true",), inputs=("src",))
    first = passed.digest(stage, checkout)
    (checkout / "other.py").write_text("c = 2\n")
    (checkout / "src/__pycache__").mkdir()
    (checkout / "src/__pycache__/a.pyc").write_text("compiled")
    assert passed.digest(stage, checkout) == first
    seen = {first, passed.digest(dataclasses.replace(stage, command=("false",)), checkout)}
    for change in (
        lambda: (checkout / "src/a.py").write_text("a = 2\n"),
        lambda: (checkout / "src/new.py").write_text(""),
        lambda: (checkout / "src/b.py").unlink(),
        lambda: (checkout / "src/new.py").rename(checkout / "src/newer.py"),
    ):
        change()
        seen.add(passed.digest(stage, checkout))
    assert len(seen) == 6


def test_a_digest_is_the_same_wherever_the_environment_lies(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for folder in ("/here/.venv", "/there/.venv"):
        monkeypatch.setattr(passed, "VENV", folder)
        digests.add(passed.digest(Stage("s", ("run", folder, "x"), inputs=("src",)), checkout))
    assert len(digests) == 1


def test_an_input_that_is_not_there_is_refused(checkout: Path) -> None:
    with pytest.raises(ValueError, match="the stage 's' depends on gone, which is not there"):
        passed.digest(Stage("s", ("true",), inputs=("src", "gone")), checkout)


def test_a_stage_is_on_record_while_it_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed, "FILE", tmp_path / "passed.json")
    passed.FILE.write_text("{}\n")
    one, two = Stage("one", ("true",)), Stage("two", ("true",))
    passed.record(one, "1")
    passed.record(two, "2")
    assert passed.recorded() == {"one": "1", "two": "2"}
    passed.record(one, None)
    assert passed.recorded() == {"two": "2"}


def test_the_stages_of_this_project() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)
    may_be_left_out = {stage.name for stage in STAGES if stage.inputs}
    for stage in STAGES:
        if stage.inputs:
            assert passed.digest(stage, ROOT) == passed.digest(stage, ROOT)
            # What a stage runs is among what it depends on.
            for argument in stage.command:
                path = argument.partition("::")[0]
                if path.startswith(("tests/", "scripts/")):
                    assert any(path.startswith(given) for given in stage.inputs), (stage, path)
    assert set(passed.recorded()) <= may_be_left_out
