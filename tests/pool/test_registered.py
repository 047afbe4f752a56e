"""Stores that other distributions bring: found, proved, and what happens to those in trouble."""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock
from lab.waiting import LIMIT, eventually
from penstock._native import check_store
from penstock.errors import (
    ConfigError,
    NotFound,
    PenstockError,
    ProtocolError,
    StoreError,
    TimedOut,
    Unavailable,
    Unreachable,
)
from penstock.pool import registered_stores
from tests.pool.registered import LEAKY, MEETING, bring, bring_troubled
from tests.silent import signalled

VALUE = b"its KV" * 1000
GRACE = 2.0
"""Seconds that a program may owe an answer (``penstock-store/src/registered/link.rs``)."""


class GivenUp(Exception):
    """What the handler of a signal raises."""


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for pools, with the example's store and its troubled form registered."""
    for folder in bring_troubled(tmp_path / "site"):
        monkeypatch.syspath_prepend(folder)
    # Those of the test before are about to end, once nobody holds their pools.
    gc.collect()
    eventually(lambda: programs_of(os.getpid()) == [])
    return tmp_path


def open_sqlite(folder: Path) -> penstock.Pool:
    return penstock.open(f"sqlite://{folder}/pool.db", timeout=LIMIT)


def troubled(folder: Path, trouble: str) -> penstock.Pool:
    """A pool with a value, which is in trouble from now on."""
    pool = penstock.open(f"troubled://me:s3cret@host{folder}/pool.db", timeout=LIMIT)
    pool.put("a", VALUE)
    (folder / "pool.db.trouble").write_text(trouble)
    return pool


def leave_unanswered(
    pool: penstock.Pool, folder: Path, timeout: float, into: bytearray | None = None
) -> float:
    """Asks a program that does not answer in time, until it says that it was asked.

    Returns when it counts as hanging at the earliest, unless it answers before.
    """
    hangs_at = time.monotonic() + timeout + GRACE
    while not (folder / "pool.db.trouble.asked").exists():
        # Who gets no time before the deadline has asked nobody.
        try:
            pool.get("a", into=into, timeout=timeout)
        except TimedOut:
            pass
        except Unreachable:
            assert time.monotonic() >= hangs_at
        else:
            raise AssertionError("the program has answered in time")
    return hangs_at


def answers_late(folder: Path, program: int, hangs_at: float) -> bool:
    """Lets a program answer that has left somebody unanswered, and waits until it has.

    False if it got no time to do so before it counts as hanging: it may have been ended.
    """
    (folder / "pool.db.trouble").unlink()
    answered = folder / "pool.db.trouble.answered"
    eventually(lambda: answered.exists() or not is_alive(program))
    return answered.exists() and time.monotonic() < hangs_at


def programs_of(process: int) -> list[int]:
    """The programs of stores that a process has started and that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            stat = (folder / "stat").read_text().rpartition(") ")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        # A process that has ended has no command line.
        if int(stat[1]) == process and b"penstock.pool.host" in command:
            found.append(int(folder.name))
    return found


def is_alive(process: int) -> bool:
    """Whether a process has not ended, whether or not somebody has waited for it."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""
    except OSError:
        return False


def eventually_hits(pool: penstock.Pool) -> None:
    """The pool has the value again, once a new program is up."""

    def hits() -> bool:
        try:
            return bytes(pool.get("a")) == VALUE
        except StoreError:
            return False

    eventually(hits)


def test_a_store_that_is_not_as_it_must_be_is_found_out(brought: Path) -> None:
    url = f"troubled://{brought}/pool.db"
    (brought / "pool.db.trouble").write_text("corrupting")
    said = check_store(url, "round trips of every size")
    assert said is not None
    assert "came back changed" in said


def test_all_layers_work_above_it(brought: Path) -> None:
    url = f"memory://?size=1MiB sqlite://{brought}/pool.db"
    with penstock.open(url, timeout=LIMIT) as pool, open_sqlite(brought) as below:
        pool.put("a", VALUE)
        assert bytes(below.get("a")) == VALUE
        below.put("b", VALUE)
        assert bytes(pool.get("b")) == VALUE
        assert len(below.list()) == 2
        assert "secret" not in below.url


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ("raising", Unavailable),
        ("miscounting", ProtocolError),
        ("mistyping", Unavailable),
    ],
)
def test_what_a_store_raises_is_an_error_in_words(
    brought: Path, trouble: str, error: type[PenstockError]
) -> None:
    with troubled(brought, trouble) as pool:
        before = programs_of(os.getpid())
        with pytest.raises(error) as raised:
            pool.get("a")
        assert "s3cret" not in str(raised.value)
        # The program goes on: nothing is wrong with it.
        (brought / "pool.db.trouble").unlink()
        assert bytes(pool.get("a")) == VALUE
        assert programs_of(os.getpid()) == before


def test_what_a_store_prints_goes_to_standard_error_at_once(
    brought: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with troubled(brought, ""):
        # Its program still runs.
        printed = capfd.readouterr()
        assert "what a store prints" in printed.err
    heard = [printed]

    def has_spoken() -> bool:
        heard.append(capfd.readouterr())
        return "its last words" in "".join(each.err for each in heard)

    eventually(has_spoken)
    assert "".join(each.out for each in heard) == ""


@pytest.mark.parametrize("trouble", ["removing nothing", "removing less"])
def test_a_count_that_cannot_be_is_an_error_in_words(brought: Path, trouble: str) -> None:
    with troubled(brought, trouble) as pool:
        before = programs_of(os.getpid())
        with pytest.raises(ProtocolError, match=r"it removed (None|-1) of 1 values"):
            pool.remove(["a"])
        (brought / "pool.db.trouble").unlink()
        assert pool.contains(["a"]) == [False]
        assert programs_of(os.getpid()) == before


def test_what_is_no_object_is_not_listed(brought: Path) -> None:
    with troubled(brought, "listing") as pool:
        before = programs_of(os.getpid())
        assert len(pool.list()) == 1
        assert programs_of(os.getpid()) == before


@pytest.mark.parametrize("trouble", ["dying", "exiting"])
def test_a_store_that_dies_is_started_again(brought: Path, trouble: str) -> None:
    with troubled(brought, trouble) as pool:
        with pytest.raises(Unreachable):
            pool.get("a")
        (brought / "pool.db.trouble").unlink()
        eventually_hits(pool)


def test_of_a_program_that_ends_nothing_is_left_but_how_it_ended(brought: Path) -> None:
    with troubled(brought, "leaving a child") as pool:

        def said() -> str:
            with pytest.raises(Unreachable) as raised:
                pool.get("a")
            return str(raised.value)

        said()
        child = int((brought / "pool.db.trouble.child").read_text())
        eventually(lambda: not is_alive(child))
        eventually(lambda: "exit status: 3" in said())
        (brought / "pool.db.trouble").unlink()
        eventually_hits(pool)


@pytest.mark.parametrize("trouble", ["sleeping", "holding"])
def test_a_store_that_hangs_is_ended_and_started_again(brought: Path, trouble: str) -> None:
    with troubled(brought, trouble) as pool:
        [program] = programs_of(os.getpid())
        hangs_at = leave_unanswered(pool, brought, timeout=0.2)

        def hangs() -> bool:
            with pytest.raises((TimedOut, Unreachable)) as raised:
                pool.get("a", timeout=0.2)
            return raised.type is Unreachable

        eventually(hangs)
        assert time.monotonic() >= hangs_at
        (brought / "pool.db.trouble").unlink()
        eventually_hits(pool)
        assert program not in programs_of(os.getpid())


@pytest.mark.parametrize("trouble", ["sleeping", "holding"])
def test_nobody_waits_for_what_a_program_owes_to_others(brought: Path, trouble: str) -> None:
    with troubled(brought, trouble) as pool:
        [program] = programs_of(os.getpid())

        def give_up() -> None:
            raise GivenUp

        # What is given up like that may be answered for as long as it might have taken. So the
        # program does not count as hanging, however slow this machine is.
        asked = brought / "pool.db.trouble.asked"
        with pytest.raises(GivenUp), signalled(give_up, asked.exists):
            pool.get("a")
        for _ in range(3):
            with pytest.raises(TimedOut):
                pool.get("a", timeout=0.2)
        assert programs_of(os.getpid()) == [program]


def test_a_late_answer_is_written_nowhere(brought: Path) -> None:
    with troubled(brought, "late") as pool:
        [program] = programs_of(os.getpid())
        into = bytearray(b"-" * 8000)
        hangs_at = leave_unanswered(pool, brought, timeout=0.3, into=into)
        into[:] = b"+" * 8000
        if answers_late(brought, program, hangs_at):
            # The next answer on the same link is the one to the next question.
            assert pool.contains(["a", "b"]) == [True, False]
            assert bytes(pool.get("a")) == VALUE
            assert programs_of(os.getpid()) == [program]
        eventually_hits(pool)
        # What was sent on that link before has been received.
        assert into == b"+" * 8000


def test_a_program_that_has_answered_late_does_not_hang_though_nobody_has_looked(
    brought: Path,
) -> None:
    with troubled(brought, "late") as pool:
        [program] = programs_of(os.getpid())
        hangs_at = leave_unanswered(pool, brought, timeout=0.3)
        is_in_time = answers_late(brought, program, hangs_at)
        # For longer than a program may owe an answer.
        time.sleep(GRACE + 1)
        if is_in_time:
            assert bytes(pool.get("a")) == VALUE
            assert programs_of(os.getpid()) == [program]
        eventually_hits(pool)


def test_a_store_that_hangs_is_ended_though_nobody_asks_again(brought: Path) -> None:
    with troubled(brought, "sleeping") as pool:
        [program] = programs_of(os.getpid())
        leave_unanswered(pool, brought, timeout=0.2)
        eventually(lambda: not Path(f"/proc/{program}").exists())
        (brought / "pool.db.trouble").unlink()
        eventually_hits(pool)


def test_damage_is_a_miss(brought: Path) -> None:
    with troubled(brought, "corrupting") as pool:
        with pytest.raises(NotFound):
            pool.get("a")
        assert pool.stats()["rejected"] == 1


def test_a_store_that_does_not_open_says_why(brought: Path) -> None:
    (brought / "x.trouble").write_text("opening")
    for url, said in [
        (f"troubled://me:s3cret@host{brought}/x", "no way to open"),
        ("sqlite://host/x", "absolute/path.db"),
        ("other:///x", "registered are"),
    ]:
        with pytest.raises(ConfigError, match=said) as raised:
            penstock.open(url)
        assert "s3cret" not in str(raised.value)
    gc.collect()
    eventually(lambda: programs_of(os.getpid()) == [])


@pytest.mark.parametrize(
    "url",
    [
        "leaky://me:s3c+r3t%2F%40x@host/",
        "leaky://me:8/s3c+r3t@host/",
        "leaky://host/{}?token=s3c+r3t%2fx&size=1GiB",
        "leaky://host/{}?api_key=s3c%2Br3t=#part",
    ],
)
def test_a_secret_is_not_repeated_however_a_store_spells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    leaky = bring(tmp_path, "leaky", {"leaky": "leaky:LeakyStore"}, leaky=LEAKY)
    monkeypatch.syspath_prepend(leaky)
    url = url if "{}" in url else f"{url}{{}}"
    said = []
    with pytest.raises(ConfigError) as raised:
        penstock.open(url.format("opening"))
    said.append(str(raised.value))
    for path in ("shown", "db"):
        with penstock.open(url.format(path)) as pool:
            with pytest.raises(Unavailable) as refused:
                pool.contains(["a"])
            said += [pool.url, str(refused.value), str(pool.describe())]
    for text in said:
        assert "host" in text
        assert "s3c" not in text
        assert "r3t" not in text


def test_a_url_whose_password_nobody_can_tell_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaky = bring(tmp_path, "leaky", {"leaky": "leaky:LeakyStore"}, leaky=LEAKY)
    monkeypatch.syspath_prepend(leaky)
    for url in ("leaky://me:s3c/r3t@host/db", "leaky://me:s3c?r3t@host/db"):
        with pytest.raises(ConfigError, match="write / in a password as %2F") as raised:
            penstock.open(url)
        assert "s3c" not in str(raised.value)
        assert "r3t" not in str(raised.value)


def test_calls_overlap_as_far_as_a_store_wants_and_answers_are_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = bring(tmp_path, "meeting", {"meeting": "meeting:MeetingStore"}, meeting=MEETING)
    monkeypatch.syspath_prepend(meeting)
    # Twice as many as the store serves at a time. It answers nobody before it serves so many.
    values = {f"value {i}": bytes([i]) * (1000 + 777 * i) for i in range(8)}
    with (
        penstock.open("meeting://x", timeout=LIMIT) as pool,
        ThreadPoolExecutor(len(values)) as threads,
    ):
        pool.put_many(values)
        for _ in range(20):
            got = threads.map(pool.get, values)
            assert [bytes(value) for value in got] == list(values.values())
        assert pool.describe()["most"] == "4"


def test_the_example_waits_for_whoever_has_the_new_database(brought: Path) -> None:
    # SQLite itself does not wait for it, when it is to write ahead for the first time.
    other = sqlite3.connect(brought / "pool.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    (brought / "pool.db.trouble").write_text("waiting")
    with ThreadPoolExecutor() as threads:
        opened = threads.submit(penstock.open, f"troubled://{brought}/pool.db", timeout=LIMIT)
        waits = brought / "pool.db.trouble.waits"
        try:
            eventually(lambda: waits.exists() or opened.done())
        finally:
            other.close()
        with opened.result() as pool:
            pool.put("a", VALUE)


def test_a_bad_moment_does_not_decide_whether_a_pool_opens(brought: Path) -> None:
    (brought / "pool.db.trouble").write_text("opening at the third try")
    with penstock.open(f"troubled://{brought}/pool.db", timeout=LIMIT) as pool:
        pool.put("a", VALUE)
    # But one that does not open is not tried forever, and what is configured wrongly is not tried
    # again.
    for trouble, error, tries in [
        ("opening never", Unreachable, "..."),
        ("opening", ConfigError, "."),
    ]:
        (brought / "pool.db.trouble.tries").unlink()
        (brought / "pool.db.trouble").write_text(trouble)
        with pytest.raises(error):
            penstock.open(f"troubled://{brought}/pool.db")
        assert (brought / "pool.db.trouble.tries").read_text() == tries


def test_its_program_ends_with_the_pool_and_with_the_process(brought: Path) -> None:
    pool = open_sqlite(brought)
    [program] = programs_of(os.getpid())
    pool.close()
    eventually(lambda: not Path(f"/proc/{program}").exists())

    code = (
        "import os, penstock\n"
        "from tests.pool.test_registered import programs_of\n"
        f"pool = penstock.open('sqlite://{brought}/pool.db', timeout={LIMIT})\n"
        "pool.put('b', b'value')\n"
        "print(*programs_of(os.getpid()), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    [program] = map(int, done.stdout.split())
    eventually(lambda: not is_alive(program))


def test_a_fork_has_a_program_of_its_own(brought: Path) -> None:
    pool = open_sqlite(brought)
    pool.put("a", VALUE)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if bytes(pool.get("a")) == VALUE else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(pool.get("a")) == VALUE
    pool.close()


def test_a_fork_of_a_process_that_starts_a_program_starts_its_own(brought: Path) -> None:
    pool = troubled(brought, "opening for long")
    [program] = programs_of(os.getpid())
    os.kill(program, signal.SIGKILL)

    def starts() -> bool:
        with pytest.raises(StoreError):
            pool.get("a", timeout=0.1)
        return program not in programs_of(os.getpid()) != []

    eventually(starts)
    child = os.fork()
    if child == 0:
        try:
            (brought / "pool.db.trouble").unlink()
            os._exit(0 if bytes(pool.get("a")) == VALUE else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    eventually_hits(pool)
    pool.close()


def test_who_brings_what_is_listed_and_conflicts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stores in {
        "one": {"both": "nobody:Store", "memory": "nobody:Store", "lib": "nobody_has.this"},
        "other": {"both": "somebody:Store"},
    }.items():
        monkeypatch.syspath_prepend(bring(tmp_path / name, name, stores))
    found = {store.scheme: store for store in registered_stores()}
    assert found["both"].distribution == "one 1.0, other 1.0"
    assert "several distributions bring" in found["both"].problem
    assert "built into Penstock" in found["memory"].problem
    for scheme, said in [("both", "one 1.0, other 1.0"), ("lib", "names no class")]:
        with pytest.raises(ConfigError, match=said):
            penstock.open(f"{scheme}://x")
    # What is built in stays what it is.
    penstock.open("memory://?size=1MiB").close()


def test_a_class_that_is_not_there_is_an_error_of_the_pool_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(bring(tmp_path, "one", {"gone": "no_such_module:Store"}))
    with pytest.raises(ConfigError, match=r"no_such_module.*one 1\.0"):
        penstock.open("gone://x")


def test_a_package_that_fails_on_import_is_in_the_way_of_its_own_scheme_only(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = bring(brought / "failing", "failing", {"failing": "fails_on_import.store:Store"})
    (site / "fails_on_import").mkdir()
    marker = brought / "imported"
    (site / "fails_on_import" / "__init__.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nraise RuntimeError('a bad day')\n"
    )
    monkeypatch.syspath_prepend(site)
    with open_sqlite(brought) as pool:
        pool.put("a", VALUE)
    assert not marker.exists()
    with pytest.raises(ConfigError, match=r"a bad day.*failing 1\.0"):
        penstock.open("failing://x")
    assert marker.exists()
