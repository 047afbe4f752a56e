"""Panics of native threads, as the connector counts and logs them."""

from __future__ import annotations

import logging

import pytest

from penstock import _native
from penstock.supervised import count_failure, failures
from penstock.vllm import panics


def test_each_panic_is_counted_once_and_each_kind_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both halves of the connector may ask in one process: nothing is counted twice."""
    seen: list[tuple[str, int, str]] = []
    monkeypatch.setattr(_native, "panics", lambda: list(seen))
    monkeypatch.setattr(panics, "failures", dict)
    monkeypatch.setattr(panics, "_taken", {})
    monkeypatch.setattr(panics, "_logged", set())
    with caplog.at_level(logging.ERROR):
        assert panics.take_panics() == {}
        seen[:] = [("penstock-copy", 2, "as long as the payload (registration.rs:307)")]
        assert panics.take_panics() == {"penstock-copy": 2}
        assert panics.take_panics() == {}
        seen[:] = [(seen[0][0], 5, seen[0][2]), ("penstock-dns", 1, "other (resolver.rs:1)")]
        assert panics.take_panics() == {"penstock-copy": 3, "penstock-dns": 1}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "penstock-copy panicked: as long as the payload (registration.rs:307)" in lines[0]
    assert "report it" in lines[0]


@pytest.mark.threads_fail
def test_failures_of_pythons_threads_are_counted_with_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They have their own line in the log already."""
    monkeypatch.setattr(panics, "_taken", dict(failures()))
    with caplog.at_level(logging.ERROR):
        count_failure("penstock-test")
        count_failure("penstock-test")
        assert panics.take_panics() == {"penstock-test": 2}
        assert panics.take_panics() == {}
    assert not caplog.records


def test_a_process_that_has_not_panicked_says_so() -> None:
    assert _native.panics() == []
