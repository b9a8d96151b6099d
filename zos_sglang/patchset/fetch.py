"""The sources of a release: from a wheel, which is fetched with pip once and kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.tree import Tree, find

CACHE = Path(".cache") / "sglang"
_RELEASE = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


def installed() -> Tree | None:
    """The SGLang of this environment, found without importing it."""
    spec = find_spec("sglang")
    places = list(spec.submodule_search_locations or []) if spec else []
    return find(Path(places[0]).parent) if places else None


def from_release(release: str, cache: Path = CACHE) -> Tree:
    """A release's sources, downloaded unless they are in the cache.

    Raises:
        PatchError: pip cannot get it.
    """
    if not _RELEASE.fullmatch(release):
        raise PatchError(f"--release {release}: not a release number such as 0.5.22")
    folder = cache / release
    if not (folder / "sglang").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary=:all:", "-d", str(cache), f"sglang=={release}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(cache.glob(f"sglang-{release}-*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise PatchError(
                f"pip download sglang=={release}: {last}. Give --wheel FILE or --tree DIR instead."
            )
        _unpack(wheels[0], folder)
        wheels[0].unlink()
    return find(folder)


def from_wheel(wheel: Path, cache: Path = CACHE) -> Tree:
    """The sources in a wheel file. Raises PatchError where it is none of SGLang's."""
    named = re.match(r"sglang-([^-]+)-", wheel.name)
    if named is None:
        raise PatchError(f"--wheel {wheel}: not a wheel of SGLang (sglang-X-....whl)")
    folder = cache / named[1]
    if not (folder / "sglang").is_dir():
        _unpack(wheel, folder)
    return find(folder)


def _unpack(wheel: Path, folder: Path) -> None:
    """Python files only, and all of them or no folder."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if n.endswith((".py", "/METADATA"))]
            archive.extractall(part, members)
    except (OSError, zipfile.BadZipFile) as error:
        raise PatchError(f"{wheel}: cannot be unpacked ({error})") from error
    part.rename(folder)
