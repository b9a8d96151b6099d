"""What a running server says about itself, over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zos_sglang.observe.block import FORMAT
from zos_sglang.observe.errors import ToolError

TIMEOUT_S = 10.0
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Server:
    """One answer of `/server_info`.

    `arguments` are the server's, as resolved; `zos` our block of one data-parallel rank, `steps` the step
    records in it; `ranks` how many ranks answered.
    """

    url: str
    arguments: Mapping[str, Any]
    zos: Mapping[str, Any]
    steps: Mapping[str, Any]
    ranks: int


def look(url: str, api_key: str | None = None, rank: int = 0, timeout_s: float = TIMEOUT_S) -> Server:
    """Ask a server. Raises ToolError, in one sentence, for everything that is not our plugin's answer."""
    url = address(url)
    info = fetch(url, "/server_info", api_key, timeout_s)
    states = info.get("internal_states")
    if not isinstance(states, list) or not states or not isinstance(states[0], dict):
        raise ToolError(f"{url} is not an SGLang server: its /server_info has no internal_states")
    if not 0 <= rank < len(states):
        raise ToolError(f"--rank {rank}: {url} has data-parallel ranks 0 to {len(states) - 1}")
    zos = states[rank].get("zos")
    if not isinstance(zos, dict):
        raise ToolError(f"no zos-sglang in the server at {url}: {_why_absent(info)}")
    steps = zos.get("steps")
    if not isinstance(steps, dict):
        raise ToolError(f"the server at {url} cannot record its steps; its log says why")
    if steps.get("format") != FORMAT:
        raise ToolError(
            f"the server at {url} has another release of zos-sglang: its step records have format "
            f"{steps.get('format')}, this one reads {FORMAT}"
        )
    return Server(url, info, zos, steps, len(states))


def _why_absent(arguments: Mapping[str, Any]) -> str:
    from zos_sglang.upstream.overlap_off import loop_left_alone

    if alone := loop_left_alone(arguments):
        return f"it runs {alone}, which zos-sglang leaves alone"
    return "it runs without the plugin, in mode off, or with an event loop that zos-sglang leaves alone"


def address(url: str) -> str:
    """`url` with a scheme and without a path. Raises ToolError for what is no address."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(full)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ToolError(f"{url} is no address of a server: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ToolError(f"{url} is no address of a server; give one like http://127.0.0.1:30000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def fetch(url: str, path: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The JSON object at `path`. Raises ToolError."""
    request = urllib.request.Request(url + path, headers={"Accept": "application/json"})
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with _opener(url).open(request, timeout=timeout_s) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ToolError(_refused(url, path, error.code)) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ToolError(f"{url} does not answer: {_why(error, timeout_s)}") from error
    except ValueError as error:
        raise ToolError(f"{url} is not an SGLang server: its {path} is no JSON") from error
    if not isinstance(found, dict):
        raise ToolError(f"{url} is not an SGLang server: its {path} is no JSON object")
    return found


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Proxies of the environment are for other machines than this one."""
    if urllib.parse.urlsplit(url).hostname in _LOCAL:
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _refused(url: str, path: str, code: int) -> str:
    if code in (401, 403):
        return f"{url} asks for its API key: give --api-key"
    if code == 404:
        return f"{url} is not an SGLang server: it has no {path}"
    return f"{url} answers {path} with HTTP status {code}"


def _why(error: Exception, timeout_s: float) -> str:
    cause: Any = getattr(error, "reason", error)
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout_s:g} seconds"
    if isinstance(cause, socket.gaierror):
        return "no address of this name"
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
