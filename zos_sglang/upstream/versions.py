"""The SGLang releases that the hooks were read and fingerprinted against."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

#: Oldest first; the last one is the one to recommend.
SUPPORTED: tuple[str, ...] = ("0.5.22", "0.5.23")


def installed() -> str | None:
    """SGLang's version from its metadata, or None where it is not installed.

    Imports nothing of SGLang: an unsupported release must not get the chance to fail first.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def built_in() -> bool:
    """Whether our source patches stand in the SGLang of this environment. Imports nothing of it."""
    spec = find_spec("sglang")
    places = list(spec.submodule_search_locations or []) if spec else []
    return any((Path(place) / "srt" / "zos_hooks.py").is_file() for place in places)
