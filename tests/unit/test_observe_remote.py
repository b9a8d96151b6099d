"""Asking a server: what comes back, and one sentence for everything that goes wrong."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.unit.made_records import records
from tests.unit.observed_server import info_of, served
from zos_sglang import __main__ as cli
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.remote import address, look

STATE = {"internal_states": [{"zos": {"mode": "overlap"}}]}


def test_a_server_with_the_plugin_is_read() -> None:
    with served(info_of(records(5), mode="resident")) as url:
        found = look(url)
    assert (found.url, found.ranks, found.zos["mode"], found.steps["launches"]) == (url, 1, "resident", 5)
    assert found.arguments["disable_overlap_schedule"] is False


def test_a_rank_is_chosen() -> None:
    both = info_of(records(5))
    both["internal_states"].append(info_of(records(7))["internal_states"][0])
    with served(both) as url:
        assert look(url, rank=1).steps["launches"] == 7
        with pytest.raises(ToolError, match="ranks 0 to 1"):
            look(url, rank=2)


def test_the_key_is_sent() -> None:
    with served(info_of(records(1)), key="secret") as url:
        assert look(url, api_key="secret").ranks == 1
        for wrong in (None, "other"):
            with pytest.raises(ToolError, match="give --api-key"):
                look(url, api_key=wrong)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("https://host/", "https://host"),
        ("http://host:1/prefix/", "http://host:1/prefix"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_may_leave_out_what_is_plain(given: str, full: str) -> None:
    assert address(given) == full


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:99999", "http://host:x", ":", "http://[::1"]
)
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(ToolError, match="is no address of a server"):
        look(url)


@pytest.mark.parametrize(
    ("answer", "status", "complaint"),
    [
        (b"<html>", 200, "is not an SGLang server: its /server_info is no JSON"),
        (b"\xff\xfe\x00", 200, "is not an SGLang server: its /server_info is no JSON"),
        ([1], 200, "is not an SGLang server: its /server_info is no JSON object"),
        ({}, 200, "has no internal_states"),
        ({"internal_states": []}, 200, "has no internal_states"),
        ({"internal_states": ["x"]}, 200, "has no internal_states"),
        ({"internal_states": [{}]}, 200, "no zos-sglang in the server at"),
        ({"internal_states": [{}], "pp_size": 2}, 200, "it runs the pipeline-parallel loop (event_loop_pp"),
        (STATE, 200, "cannot record its steps"),
        (info_of(format=2), 200, "another release of zos-sglang"),
        ({}, 404, "it has no /server_info"),
        ({}, 403, "give --api-key"),
        ({}, 500, "with HTTP status 500"),
    ],
)
@pytest.mark.parametrize("command", ["top", "doctor"])
def test_everything_else_is_one_line_and_exit_code_2(
    command: str, answer: Any, status: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(answer, status) as url:
        assert cli.main([command, url]) == 2
    out, err = capsys.readouterr()
    assert out == "" and complaint in err and err.startswith("zos-sglang: error: ") and err.count("\n") == 1


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert cli.main(["doctor", url]) == 2
    assert capsys.readouterr().err == f"zos-sglang: error: {url} does not answer: Connection refused\n"


def test_a_name_without_an_address_is_told() -> None:
    with pytest.raises(ToolError, match=r"no\.such\.host\.invalid does not answer: "):
        look("http://no.such.host.invalid")


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        with pytest.raises(ToolError, match=r"no answer within 0\.2 seconds"):
            look(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.2)


def test_what_speaks_another_protocol_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        import threading

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(ToolError, match="does not answer: "):
            look(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_proxies_are_not_asked_about_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with served(info_of(records(1))) as url:
        assert look(url).ranks == 1
