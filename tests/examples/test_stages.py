"""What the examples say while they work."""

from __future__ import annotations

import re

import pytest

from examples.stages import stage


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_line_has_the_seconds_since_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    stage("reading the text")
    assert re.fullmatch(r"\[ *\d+\.\d s\] reading the text\n", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "NODE_RANK"])
def test_only_the_first_rank_speaks(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "0")
    stage("first")
    monkeypatch.setenv(name, "1")
    stage("second")
    assert "first" in (printed := capsys.readouterr().out)
    assert "second" not in printed
