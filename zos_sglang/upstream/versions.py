"""The SGLang releases that the hooks were read and fingerprinted against."""

from importlib.metadata import PackageNotFoundError, version

SUPPORTED: tuple[str, ...] = ("0.5.23",)


def installed() -> str | None:
    """SGLang's version from its metadata, or None where it is not installed.

    Imports nothing of SGLang: an unsupported release must not get the chance to fail first.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None
