"""Known vulnerabilities in what is installed, by pip-audit; `python -m zos_sglang.testing.audit`.

pip-audit asks PyPI's JSON interface, which not every mirror has: then it reports every package as unknown,
and a careless reader would see "no known vulnerabilities". So a release with well-known ones is asked about
first. Only where that answer cannot be had, the audit is skipped, and says so in one line; all else that goes
wrong fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

#: A release with known vulnerabilities (CVE-2021-3572 among them).
CANARY = "pip==20.0"
TOOL = Path(".cache") / "venv-audit"
_TIMEOUT_S = 600

#: Runs pip-audit with these arguments and returns what it printed as JSON.
Ask = Callable[[Sequence[str]], dict[str, Any]]


class UnreachableError(RuntimeError):
    """The tool or its data cannot be had here; `str()` says which."""


@dataclass(frozen=True)
class Finding:
    """One vulnerability of one package. `ours`: we require the package ourselves, so we can act on it."""

    package: str
    version: str
    name: str
    fixed_in: tuple[str, ...]
    ours: bool

    def __str__(self) -> str:
        way_out = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fix yet"
        return f"{self.package} {self.version}: {self.name}, {way_out}"


def audit(ask: Ask, folder: str, direct: frozenset[str]) -> tuple[list[Finding], int, list[str]]:
    """Findings in an environment, how many packages were looked up, and those that PyPI does not know.

    Args:
        ask: runs pip-audit.
        folder: site-packages.
        direct: normalised names of the packages that we require ourselves.

    Raises:
        UnreachableError: the data cannot be had.
    """
    with tempfile.TemporaryDirectory() as place:
        canary = Path(place) / "canary.txt"
        canary.write_text(CANARY + "\n")
        answer = ask(["--requirement", str(canary), "--disable-pip", "--no-deps"])
    if not any(one.get("vulns") for one in answer["dependencies"]):
        raise UnreachableError(f"the vulnerability data of PyPI ({CANARY} is not known to have any)")
    findings, unknown, known = [], [], 0
    for one in ask(["--path", folder])["dependencies"]:
        if "skip_reason" in one:
            unknown.append(one["name"])
            continue
        known += 1
        for found in one["vulns"]:
            cves = (alias for alias in found.get("aliases", []) if alias.startswith("CVE-"))
            name = next(cves, found["id"])
            ours = _normal(one["name"]) in direct
            findings.append(Finding(one["name"], one["version"], name, tuple(found["fix_versions"]), ours))
    return findings, known, unknown


def direct_requirements(package: str = "zos-sglang") -> frozenset[str]:
    """Normalised names of what the installed package requires, extras included."""
    try:
        listed = requires(package) or []
    except PackageNotFoundError:
        return frozenset()
    return frozenset(_normal(re.split(r"[^\w.-]", one, maxsplit=1)[0]) for one in listed)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def tool(folder: Path = TOOL) -> Path:
    """pip-audit in an environment of its own, made on first use. Raises UnreachableError."""
    program = folder / "bin" / "pip-audit"
    if not program.exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "pip-audit"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UnreachableError(f"pip-audit (pip install: {last})")
    return program


def asker(program: Path) -> Ask:
    """Runs the program. Its exit code 1 means findings; without JSON on its output it has failed."""

    def ask(arguments: Sequence[str]) -> dict[str, Any]:
        command = [str(program), "--format", "json", "--progress-spinner", "off", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            if "Connection" in done.stderr or "Timeout" in done.stderr or "resolve" in done.stderr:
                raise UnreachableError(f"the vulnerability data ({last[:200]})") from None
            raise RuntimeError(f"pip-audit failed: {last}") from None
        return answer

    return ask


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1: a package that we require has a known vulnerability, or the audit failed."""
    parser = argparse.ArgumentParser(description="Known vulnerabilities in what is installed.")
    here = sysconfig.get_path("purelib")
    parser.add_argument("--site-packages", default=here, help="of the environment (default: this Python's)")
    args = parser.parse_args(argv)
    try:
        found, known, unknown = audit(asker(tool()), args.site_packages, direct_requirements())
    except UnreachableError as error:
        print(f"audit: SKIPPED, nothing was audited: cannot reach {error}")
        return 0
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"audit: failed: {error}", file=sys.stderr)
        return 1
    for one in found:
        print(f"audit: {'' if one.ours else 'comes with SGLang, for information: '}{one}")
    if unknown:
        print(f"audit: not on PyPI, so not audited: {', '.join(unknown)}")
    mine = [one for one in found if one.ours]
    print(f"audit: {known} packages, {len(found)} known vulnerabilities, {len(mine)} in what we require")
    return 1 if mine else 0


if __name__ == "__main__":
    sys.exit(main())
