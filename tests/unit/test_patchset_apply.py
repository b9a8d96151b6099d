"""`patches apply|check|revert` on a toy tree: all or nothing, idempotent, and back to the same bytes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.unit import patch_case
from zos_sglang import __main__ as cli
from zos_sglang.patchset import transaction
from zos_sglang.patchset.state import State

SCHEDULER, SERVER = patch_case.FILES


@pytest.fixture
def toy(tmp_path):
    """(tree, patches, what the tree holds)"""
    tree, patches = patch_case.write(tmp_path)
    return tree, patches, patch_case.content(tree)


def run(command, toy, *more):
    return cli.main(["patches", command, "--tree", str(toy[0]), "--patches", str(toy[1]), *more])


def refused(command, toy, capsys, *more):
    """The one message of a refused command, which changed nothing."""
    before = patch_case.content(toy[0])
    assert run(command, toy, *more) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("zos-sglang: error: ") and err.count("\n") == 1
    assert patch_case.content(toy[0]) == before
    return err


def test_apply_patches_every_file_and_check_says_so(toy, capsys):
    assert run("check", toy) == 1
    assert run("apply", toy) == 0
    assert patch_case.content(toy[0]) == patch_case.patched(toy[2])
    assert run("check", toy) == 0
    assert "patched SGLang 1.2.3" in capsys.readouterr().out


def test_a_second_apply_changes_nothing_and_says_so(toy, capsys):
    run("apply", toy)
    inode = (toy[0] / SCHEDULER).stat().st_ino
    capsys.readouterr()
    assert run("apply", toy) == 0
    assert "applied already" in capsys.readouterr().out
    assert (toy[0] / SCHEDULER).stat().st_ino == inode


def test_revert_gives_the_same_bytes_rights_and_times_and_leaves_nothing_behind(toy):
    (toy[0] / SERVER).chmod(0o640)
    before = {path: patch_case.rights(toy[0] / path) for path in patch_case.FILES}
    run("apply", toy)
    assert patch_case.rights(toy[0] / SERVER)[0] == before[SERVER][0]
    assert run("revert", toy) == 0
    assert patch_case.content(toy[0]) == toy[2]
    assert {path: patch_case.rights(toy[0] / path) for path in patch_case.FILES} == before
    assert not (toy[0] / "sglang/.zos_patches").exists()
    assert run("revert", toy) == 0


def test_the_originals_are_kept_while_the_patches_are_in(toy):
    run("apply", toy)
    kept = toy[0] / "sglang/.zos_patches/originals"
    assert {p: (kept / p).read_bytes() for p in patch_case.FILES} == patch_case.FILES


def test_without_the_kept_originals_revert_takes_the_lines_out_again(toy):
    run("apply", toy)
    shutil.rmtree(toy[0] / "sglang/.zos_patches")
    assert run("revert", toy) == 0
    assert patch_case.content(toy[0]) == toy[2]


def test_a_kept_original_that_was_changed_is_not_put_back(toy):
    run("apply", toy)
    kept = toy[0] / "sglang/.zos_patches/originals" / SCHEDULER
    kept.unlink()
    kept.write_bytes(b"something else\n")
    assert run("revert", toy) == 0
    assert patch_case.content(toy[0]) == toy[2]


def test_other_names_of_a_file_keep_what_they_had(toy, tmp_path):
    """Package managers link site-packages to their cache: what is there must not be written through."""
    os.link(toy[0] / SCHEDULER, tmp_path / "cache.py")
    run("apply", toy)
    assert (tmp_path / "cache.py").read_bytes() == patch_case.FILES[SCHEDULER]
    run("revert", toy)
    assert (tmp_path / "cache.py").read_bytes() == patch_case.FILES[SCHEDULER]


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_dry_run_changes_nothing(toy, command, capsys):
    if command == "revert":
        run("apply", toy)
    before = patch_case.content(toy[0])
    capsys.readouterr()
    assert run(command, toy, "--dry-run") == 0
    assert "would " in capsys.readouterr().out
    assert patch_case.content(toy[0]) == before


# ---------------------------------------------------------------- where SGLang lies, and which it is


def test_a_git_checkout_and_the_package_itself_are_found_too(toy, tmp_path):
    (tmp_path / "checkout").mkdir()
    toy[0].rename(tmp_path / "checkout" / "python")
    assert run("apply", (tmp_path / "checkout", toy[1])) == 0
    assert run("check", (tmp_path / "checkout/python/sglang", toy[1])) == 0


def test_a_checkout_that_states_no_release_is_known_by_its_files(tmp_path):
    tree, patches = patch_case.write(tmp_path, release=None)
    assert run("apply", (tree, patches)) == 0
    assert run("check", (tree, patches)) == 0


def test_the_metadata_beside_a_package_states_its_release(tmp_path, capsys):
    toy = patch_case.write(tmp_path, release=None)
    (toy[0] / "sglang-7.7.7.dist-info").mkdir()
    assert "there are no patches for SGLang 7.7.7 (there are for: 1.2.3)" in refused("apply", toy, capsys)


def test_a_checkout_of_no_release_is_refused(tmp_path, capsys):
    toy = patch_case.write(tmp_path, release=None)
    (toy[0] / SERVER).write_bytes(b"")
    assert "does not state its release" in refused("apply", toy, capsys)


def test_a_folder_without_sglang_is_refused(toy, tmp_path, capsys):
    assert "no SGLang there" in refused("apply", (tmp_path / "patches", toy[1]), capsys)


def test_another_release_is_refused(toy, capsys):
    (toy[0] / "sglang/_version.py").write_text("__version__ = version = '9.9.9'\n")
    assert "no patches for SGLang 9.9.9" in refused("apply", toy, capsys)


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("content", [b"", b"changed\n", None])
def test_a_file_that_is_not_the_release_is_refused_by_name(toy, capsys, command, content):
    path = toy[0] / SERVER
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    message = refused(command, toy, capsys)
    assert f"{SERVER} {'is missing' if content is None else 'has sha256'}" in message
    assert "Reinstall sglang==1.2.3" in message
    assert run("check", toy) == 2


def test_a_file_that_is_a_link_is_refused(toy, capsys):
    (toy[0] / SERVER).rename(toy[0] / "real.py")
    (toy[0] / SERVER).symlink_to(toy[0] / "real.py")
    assert "is a link" in refused("apply", toy, capsys)


def test_a_file_where_the_patches_create_one_is_refused(toy, capsys):
    (toy[0] / patch_case.NEW).write_text("mine\n")
    assert patch_case.NEW in refused("apply", toy, capsys)


# ---------------------------------------------------------------- faults and crashes


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("at", range(3))
def test_an_error_between_two_renames_puts_everything_back(toy, capsys, monkeypatch, command, at):
    if command == "revert":
        run("apply", toy)
        capsys.readouterr()
    put, calls = transaction._put, []

    def failing(source, path):
        calls.append(path)
        if len(calls) == at + 1:
            raise OSError(28, "No space left on device", str(path))
        put(source, path)

    monkeypatch.setattr(transaction, "_put", failing)
    assert "No space left on device" in refused(command, toy, capsys)
    assert len(calls) == at + 1 + (at + 1)
    monkeypatch.undo()
    assert run("check", toy) == (0 if command == "revert" else 1)
    assert command == "revert" or not (toy[0] / "sglang/.zos_patches").exists()


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_an_interruption_waits_until_all_files_are_in_place(toy, monkeypatch, command):
    if command == "revert":
        run("apply", toy)
    put = transaction._put

    def interrupted(source, path):
        os.kill(os.getpid(), signal.SIGINT)
        put(source, path)

    monkeypatch.setattr(transaction, "_put", interrupted)
    # A shell's job in the background is started with SIGINT ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(command, toy) == 130
    finally:
        signal.signal(signal.SIGINT, inherited)
    monkeypatch.undo()
    assert run("check", toy) == (0 if command == "apply" else 1)
    # The originals are kept as long as they are needed.
    assert (toy[0] / "sglang/.zos_patches/originals" / SCHEDULER).exists() is (command == "apply")
    assert run("revert", toy) == 0
    assert patch_case.content(toy[0]) == toy[2]


def test_what_cannot_be_tidied_up_afterwards_is_no_failure(toy, monkeypatch):
    def failing(path, **_):
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(os, "rmdir", failing)
    assert run("apply", toy) == 0
    monkeypatch.undo()
    assert (toy[0] / "sglang/.zos_patches/old").exists()
    assert run("check", toy) == 0
    assert run("revert", toy) == 0
    assert not (toy[0] / "sglang/.zos_patches").exists()


def test_the_originals_and_their_names_are_on_disk_before_the_first_rename(toy, monkeypatch):
    fsync, put, order = os.fsync, transaction._put, []

    def syncing(handle):
        order.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def putting(source, path):
        order.append("put")
        put(source, path)

    def no_links(source, copy):
        raise OSError(95, "Operation not supported", source)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(transaction, "_put", putting)
    assert run("apply", toy) == 0
    before = set(order[: order.index("put")])
    package = toy[0] / "sglang"
    kept = package / ".zos_patches/originals"
    files = [kept / path for path in patch_case.FILES]
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(package)}
    assert {str(path) for path in [*files, *folders]} <= before


CRASH = """
import os, sys
from zos_sglang.__main__ import main
from zos_sglang.patchset import transaction
put, left = transaction._put, [int(sys.argv[1])]
def crashing(source, path):
    if not left[0]:
        os._exit(9)
    left[0] -= 1
    put(source, path)
transaction._put = crashing
main(sys.argv[2:])
"""


def crash(command, toy, after):
    """Run a command in a process that dies after so many renames."""
    arguments = ["patches", command, "--tree", str(toy[0]), "--patches", str(toy[1])]
    done = subprocess.run([sys.executable, "-c", CRASH, str(after), *arguments], check=False)
    assert done.returncode == 9


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("repair", ["apply", "revert"])
def test_a_crash_between_two_renames_is_seen_and_repaired_either_way(toy, capsys, command, after, repair):
    if command == "revert":
        run("apply", toy)
    crash(command, toy, after)
    whole = {"apply": 1, "revert": 0}[command]
    assert run("check", toy) == (3 if after else whole)
    assert run(repair, toy) == 0
    assert ("it was half applied" in capsys.readouterr().out) is bool(after)
    assert patch_case.content(toy[0]) == (patch_case.patched(toy[2]) if repair == "apply" else toy[2])
    assert run("revert", toy) == 0
    assert patch_case.content(toy[0]) == toy[2]


def test_the_first_patches_applied_by_hand_are_half_applied_and_can_be_completed(toy):
    for name in list(patch_case.PATCHES)[:2]:
        patch = toy[1] / "sglang-1.2.3" / name
        subprocess.run(["patch", "-p1", "-s", "--binary", "-d", toy[0], "-i", patch], check=True)
    assert patch_case.look(*toy[:2]).state is State.HALF
    assert run("apply", toy) == 0
    assert patch_case.content(toy[0]) == patch_case.patched(toy[2])


def test_two_runs_at_once_are_refused(toy, capsys):
    handle = os.open(toy[0] / "sglang", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert "another run is changing it" in refused("apply", toy, capsys)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- the patch folder


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "0002-both.patch").unlink(), "No such file"),
        (lambda f: (f / "0009-stray.patch").write_text("x"), "0009-stray.patch stands in"),
        (lambda f: (f / "series").write_text(""), "ends in the middle"),
        (lambda f: (f / "series").write_bytes(b"\xff"), "not ASCII"),
        (lambda f: (f / "series").write_text("what\n"), "line 1: expected"),
        (
            lambda f: (f / "series").write_text(patch_case.series().replace("0003-again.patch\n", "")),
            "line 10: expected",
        ),
        (
            lambda f: (f / "0001-new.patch").write_bytes(
                patch_case.PATCHES["0001-new.patch"].replace(b"X = 1", b"X = 2")
            ),
            "0001-new.patch and its series disagree",
        ),
    ],
)
def test_a_damaged_patch_folder_is_refused(toy, capsys, damage, told):
    damage(toy[1] / "sglang-1.2.3")
    assert told in refused("apply", toy, capsys)


def test_json_holds_state_and_files_and_errors_too(toy, capsys):
    assert run("check", toy, "--json") == 1
    assert json.loads(capsys.readouterr().out)["state"] == "not applied"
    assert run("apply", toy, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["before"], report["state"], report["release"]) == ("not applied", "applied", "1.2.3")
    assert set(report["files"]) == set(patch_case.AFTER)
    (toy[0] / SERVER).write_text("x")
    assert run("revert", toy, "--json") == 2
    assert SERVER in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("command", ["apply", "check", "revert", "diff"])
def test_every_subcommand_has_help_with_its_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["patches", command, "--help"])
    assert done.value.code == 0
    assert "Exit codes" in capsys.readouterr().out


def test_an_empty_tree_is_not_the_current_folder(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["patches", "apply", "--tree", ""])
    assert ended.value.code == 2 and "--tree: it is empty" in capsys.readouterr().err
