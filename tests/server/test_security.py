"""By default the plugin opens no port and writes no file; and its control is behind SGLang's admin key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.conftest import Client
from zos_sglang.modes import MODES
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.holdings import Holdings, holdings, without_numbers
from zos_sglang.testing.server import ServerProcess, free_port

pytestmark = pytest.mark.server

USER, ADMIN = "for-users", "for-admins"
KEYS = ("--api-key", USER, "--admin-api-key", ADMIN)

#: Runs when any Python of a server starts, before all else: every file that it opens to write, every address
#: that it binds. Short-lived ones too, which no look at /proc would find.
AUDIT = """
import os, sys

_log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def _hook(event, args):
    if event == "open":
        path, _, flags = args
        if isinstance(path, int) or not (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        told = f"open {os.fsdecode(path)}"
    elif event == "socket.bind":
        told = f"bind {args[1]}"
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "shutil.copyfile"):
        told = f"{event} {args[0]}"
    else:
        return
    os.write(_log, (told + "\\n").encode("utf-8", "replace"))

sys.addaudithook(_hook)
"""


@dataclass
class Seen:
    """One server after the same traffic: what it holds, what its processes did, what lies in its folders."""

    server: ServerProcess
    held: Holdings
    did: set[str]
    left: set[str]


def _traffic(client: Client) -> None:
    client.http.headers["Authorization"] = f"Bearer {USER}"
    assert len(client.wave(6)) == 6
    client.http.get("/server_info").raise_for_status()


def _watched(model: Path, mode: str | None, folder: Path) -> Seen:
    """A server with temporary, home and working files in folders of its own."""
    for name in ("tmp", "home", "path"):
        (folder / name).mkdir(parents=True)
    (folder / "path" / "sitecustomize.py").write_text(AUDIT)
    env = {
        **distribution(folder / "path", "audited", "1.0"),
        **{"TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home")},
        **{
            "XDG_CACHE_HOME": str(folder / "home"),
            "AUDIT_LOG": str(folder / "did"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    }
    server = ServerProcess(model, mode=mode, env=env, args=KEYS, log=folder / "log", port=free_port())
    server.start()
    try:
        _traffic(Client(server))
        here = psutil.Process(server.pid)
        held = holdings([here, *here.children(recursive=True)])
    except BaseException:
        server.stop()
        raise
    return Seen(server, held, set(), set())


def _ended(seen: Seen, folder: Path) -> None:
    """What can be told of it when it is over; names without what differs from run to run."""
    seen.server.stop()
    own = str(folder)

    def name(text: str) -> str:
        # The same digits inside a longer number are not the port.
        text = re.sub(rf"(?<![0-9a-z]){seen.server.port}(?![0-9a-z])", "PORT", text.replace(own, "HERE"))
        # `tempfile` writes one to find out whether it can.
        return without_numbers(re.sub(r"(?<=HERE/tmp/)[a-z0-9_]{8}$", "PROBE", text))

    seen.did = {name(line) for line in (folder / "did").read_text().splitlines()}
    seen.left = {
        name(os.path.join(at, file))
        for top in ("tmp", "home")
        for at, _, files in os.walk(folder / top)
        for file in files
    }
    seen.held.written = {name(path) for path in seen.held.written}
    seen.held.shared = {name(path) for path in seen.held.shared}


@pytest.fixture(scope="module")
def both(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Seen]]:
    """Stock and ours after the same traffic; ours still serves."""
    folders = {mode: tmp_path_factory.mktemp(mode) / "here" for mode in ("stock", "resident")}
    found = {mode: _watched(tiny_model, None if mode == "stock" else mode, f) for mode, f in folders.items()}
    yield found
    for seen in found.values():
        seen.server.stop()


@pytest.fixture(scope="module")
def ours(both: dict[str, Seen]) -> Client:
    return Client(both["resident"].server)


def _switch(client: Client, key: str | None, mode: Any = "overlap", **more: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"server_args": {"zos_mode": mode, **more}}
    return client.http.post("/set_internal_state", json=body, headers=headers).status_code


def test_the_mode_is_behind_the_admin_key_as_upstreams_own_control_is(ours: Client) -> None:
    for key, status in ((None, 401), ("wrong", 401), (USER, 401), (ADMIN, 200)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        assert ours.http.post("/flush_cache", headers=headers).status_code == status
        assert _switch(ours, key) == status, key
    # Who may not ask learns nothing about what may be asked.
    assert _switch(ours, USER, "nonsense") == 401
    assert _switch(ours, ADMIN, "nonsense") == 400


def test_a_request_without_the_key_changes_nothing(ours: Client) -> None:
    ours.http.headers["Authorization"] = f"Bearer {USER}"
    _switch(ours, ADMIN, "resident")
    before = ours.zos()
    for mode in MODES:
        _switch(ours, USER, mode)
    after = ours.zos()
    assert before is not None and after is not None
    assert (after["mode"], after["pending_mode"]) == (before["mode"], before["pending_mode"])


def test_no_request_sets_a_path_or_any_setting(ours: Client) -> None:
    """The keys of the live switch are a closed set of numbers."""
    for key, value in (
        ("zos_trace", 1),
        ("trace", 1),
        ("ZOS_TRACE", 1),
        ("zos_strict", 0),
        ("zos_trace_mb", 1),
    ):
        headers = {"Authorization": f"Bearer {ADMIN}"}
        reply = ours.http.post("/set_internal_state", json={"server_args": {key: value}}, headers=headers)
        assert (reply.status_code, reply.json()) == (200, [False]), key
        text = ours.http.post("/set_internal_state", json={"server_args": {key: "/tmp/x"}}, headers=headers)
        assert 400 <= text.status_code < 500, key


def test_ours_listens_where_stock_listens(both: dict[str, Seen]) -> None:
    for seen in both.values():
        assert f"127.0.0.1:{seen.server.port}" in seen.held.listening
    count = {mode: (len(seen.held.listening), sum(seen.held.unix.values())) for mode, seen in both.items()}
    assert count["resident"] == count["stock"]


def test_ours_writes_and_binds_nothing_that_stock_does_not(
    both: dict[str, Seen], ours: Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Last: it ends both servers, after a few switches that stock does not have."""
    for mode in ("stock", "overlap", "resident"):
        assert _switch(ours, ADMIN, mode) == 200
        _traffic(ours)
    for seen in both.values():
        _ended(seen, Path(seen.server.log).parent)
    stock, resident = both["stock"], both["resident"]
    assert resident.did - stock.did == set()
    assert resident.left - stock.left == set()
    assert resident.held.written - stock.held.written == set()
    assert resident.held.shared - stock.held.shared == set()
    # The watch itself worked.
    assert any(line.startswith("bind") for line in stock.did)
    assert "open HERE/tmp/PROBE" in stock.did
    assert stock.left
