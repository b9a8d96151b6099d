"""The dependency audit: what it fails on, and that it never takes "cannot know" for "none"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing import audit

PIP = {"name": "pip", "version": "20.0"}
CANARY = {**PIP, "vulns": [{"id": "PYSEC-1", "fix_versions": ["21.1"], "aliases": []}]}
CLEAN = {"name": "rich", "version": "13", "vulns": []}
UNKNOWN = {"name": "zos-sglang", "skip_reason": "Dependency not found on PyPI"}


def hurt(name: str, fixes: list[str]) -> dict[str, Any]:
    vulns = [{"id": "PYSEC-2", "aliases": ["GHSA-x", "CVE-2099-1"], "fix_versions": fixes}]
    return {"name": name, "version": "1.0", "vulns": vulns}


def answers(canary: dict[str, Any], *installed: dict[str, Any]) -> audit.Ask:
    return lambda words: {"dependencies": [canary] if "--requirement" in words else list(installed)}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def go(*made: dict[str, Any]) -> tuple[int, str]:
        monkeypatch.setattr(audit, "tool", lambda: Path("pip-audit"))
        monkeypatch.setattr(audit, "asker", lambda program: answers(*made))
        monkeypatch.setattr(audit, "direct_requirements", lambda: frozenset({"pyyaml", "rich"}))
        code = audit.main([])
        return code, capsys.readouterr().out

    return go


def test_a_vulnerability_in_what_we_require_fails_and_names_the_way_out(run: Any) -> None:
    code, said = run(CANARY, CLEAN, hurt("PyYAML", ["1.1"]))
    assert code == 1
    assert "audit: PyYAML 1.0: CVE-2099-1, fixed in 1.1" in said
    assert said.endswith("2 packages, 1 known vulnerabilities, 1 in what we require\n")


def test_one_that_comes_with_sglang_is_told_and_does_not_fail(run: Any) -> None:
    code, said = run(CANARY, hurt("aiohttp", []), UNKNOWN)
    assert code == 0
    assert "comes with SGLang, for information: aiohttp 1.0: CVE-2099-1, no fix yet" in said
    assert "not on PyPI, so not audited: zos-sglang" in said


def test_data_that_does_not_know_the_canary_is_a_skip_that_says_so(run: Any) -> None:
    """As of a mirror without PyPI's JSON interface: pip-audit itself would say "no known vulnerabilities"."""
    for canary in ({"name": "pip", "skip_reason": "not found"}, {**PIP, "vulns": []}):
        code, said = run(canary, CLEAN)
        assert (code, said.count("\n")) == (0, 1)
        assert said.startswith("audit: SKIPPED, nothing was audited: cannot reach the vulnerability data")


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("echo broken >&2; exit 3", (1, "audit: failed: pip-audit failed: broken")),
        ("echo ConnectionError: name >&2; exit 1", (0, "audit: SKIPPED, nothing was audited")),
    ],
)
def test_only_an_unreachable_host_is_a_skip(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    wanted: tuple[int, str],
) -> None:
    script = tmp_path / "pip-audit"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(audit, "tool", lambda: script)
    code = audit.main([])
    shown = capsys.readouterr()
    assert (code, (shown.out + shown.err)[: len(wanted[1])]) == wanted


def test_our_requirements_are_known_by_name() -> None:
    assert {"sglang", "pydantic", "pyzmq", "httpx"} <= audit.direct_requirements()
    assert audit.direct_requirements("no-such-package") == frozenset()
