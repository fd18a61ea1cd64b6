"""The last boot epoch beside the store: it is there after a restart, and whatever is wrong with it is one warning."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cluster import eventually
from p2pkv import Config, Node
from p2pkv._native import NamespaceEpochs
from p2pkv.disk import small_file
from p2pkv.disk.boot_file import BootFile
from p2pkv.disk.epochs_file import EpochsFile

BOOT = 1_700_000_000_000_000_000


def written(folder: Path, node_id: str = "n1", boot: int = BOOT) -> Path:
    file = BootFile(str(folder), node_id)
    file.write(boot)
    file.close()
    return file.path


def test_what_was_written_is_read_by_the_next_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "disk", "knoten-ä")
    assert path == tmp_path / "disk.boot"
    assert BootFile(str(tmp_path / "disk"), "knoten-ä").read() == BOOT
    assert os.listdir(tmp_path) == ["disk.boot"]
    assert caplog.text == ""


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    text = written(tmp_path / "disk", "golden").read_text()
    assert text == (
        "p2pkv boot epoch\nversion=1\nnode=golden\nboot=1700000000000000000\ncheck=2627a62f460fb335\n"
    )


def test_the_first_run_remembers_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert BootFile(str(tmp_path / "disk"), "n1").read() == 0
    assert caplog.text == ""


def test_a_lower_one_does_not_replace_it(tmp_path: Path) -> None:
    file = BootFile(str(tmp_path / "disk"), "n1")
    file.write(BOOT)
    file.write(BOOT - 1)
    assert file.read() == BOOT


def test_every_damaged_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "disk")
    good = path.read_bytes()
    damaged = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
    for text in [
        *damaged,
        *(good[:at] for at in range(len(good))),
        good + b"\n",
        bytes(5000),
        os.urandom(99),
    ]:
        path.write_bytes(text)
        caplog.clear()
        file = BootFile(str(tmp_path / "disk"), "n1")
        assert file.read() == file.read() == 0, text
        assert len(caplog.records) == 1


def test_another_nodes_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "disk", "other")
    assert BootFile(str(tmp_path / "disk"), "n1").read() == 0
    assert "another node's" in caplog.text


def test_one_beyond_every_clock_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "disk", boot=2**63 - 1)
    assert BootFile(str(tmp_path / "disk"), "n1").read() == 0
    assert "beyond every clock" in caplog.text


def test_a_full_disk_costs_a_warning_and_keeps_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "disk")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(small_file.os, "fsync", full)
    file = BootFile(str(tmp_path / "disk"), "n1")
    file.write(BOOT + 1)
    file.write(BOOT + 2)
    file.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert file.read() == BOOT


def test_a_folder_that_is_not_there_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "missing" / "disk")
    assert len(caplog.records) == 1
    assert not (tmp_path / "missing").exists()


def test_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    real = os.fsync

    def hang(descriptor: int) -> None:
        answers.wait()
        real(descriptor)

    monkeypatch.setattr(small_file, "_WAIT_S", 0.05)
    monkeypatch.setattr(small_file.os, "fsync", hang)
    file = BootFile(str(tmp_path / "disk"), "n1")
    file.write(BOOT)
    file.write(BOOT + 1)
    assert "did not answer" in caplog.text
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "p2pkv-small-file":
            thread.join()
    assert BootFile(str(tmp_path / "disk"), "n1").read() == BOOT + 1


def test_a_disk_that_hangs_when_it_is_read_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answers, stat = written(tmp_path / "disk"), threading.Event(), os.fstat

    def hang(descriptor: int) -> os.stat_result:
        answers.wait()
        return stat(descriptor)

    monkeypatch.setattr(small_file, "_WAIT_S", 0.05)
    monkeypatch.setattr(small_file.os, "fstat", hang)
    try:
        assert BootFile(str(tmp_path / "disk"), "n1").read() == 0
        assert f"can't be read ({path}): the disk did not answer" in caplog.text
    finally:
        answers.set()


def test_where_others_write_too_nobody_elses_file_is_read_or_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("another file\n")
    path = tmp_path / "disk.boot"
    path.with_name("disk.boot.new").symlink_to(victim)
    assert written(tmp_path / "disk") == path
    assert victim.read_text() == "another file\n"
    assert caplog.text == ""
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    assert BootFile(str(tmp_path / "disk"), "n1").read() == 0
    assert "symbolic links" in caplog.text
    path.unlink()
    os.mkfifo(path)  # which nobody will ever write to
    caplog.clear()
    assert BootFile(str(tmp_path / "disk"), "n1").read() == 0
    assert "no file of this user's" in caplog.text
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    os.chown(path, 65534, 65534)
    caplog.clear()
    assert BootFile(str(tmp_path / "disk"), "n1").read() == 0
    assert "no file of this user's" in caplog.text


def test_what_the_disk_did_not_take_is_written_when_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_file, "_RETRY_S", 0.01)
    folder = tmp_path / "later"
    boot, epochs = BootFile(str(folder / "disk"), "n1"), EpochsFile(str(folder / "disk"), "n1")
    known, name = NamespaceEpochs(), b"n" * 16
    known.raise_to([(name, 7)])
    boot.write(BOOT)
    boot.write(BOOT - 1)
    epochs.write(known.all)
    assert len(caplog.records) == 2
    folder.mkdir()
    eventually(lambda: BootFile(str(folder / "disk"), "n1").read() == BOOT, 10.0)
    read = NamespaceEpochs()

    def is_there() -> bool:
        EpochsFile(str(folder / "disk"), "n1").read(read)
        return read.all() == [(name, 7)]

    eventually(is_there, 10.0)
    assert len(caplog.records) == 2


def test_without_a_thread_to_be_had_the_next_write_is_another_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = BootFile(str(tmp_path / "disk"), "n1")
    with monkeypatch.context() as short:

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        short.setattr(threading.Thread, "start", start)
        file.write(BOOT)
        assert file.read() == 0
    assert "can't start new thread" in caplog.text
    file.write(BOOT)
    assert file.read() == BOOT


def test_a_closed_file_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_file, "_RETRY_S", 600.0)
    file = BootFile(str(tmp_path / "missing" / "disk"), "n1")
    file.write(BOOT)
    file.write(BOOT + 1)
    file.close()
    for thread in threading.enumerate():
        if thread.name == "p2pkv-small-file":
            thread.join(60.0)
            assert not thread.is_alive()
    assert not (tmp_path / "missing").exists()


def test_a_node_goes_on_above_its_last_boot_though_its_clock_was_set_back(tmp_path: Path) -> None:
    config = Config(
        node_id="n1",
        listen="127.0.0.1:0",
        disk_size="16MiB",
        disk_path=str(tmp_path / "disk"),
        pool_size="4MiB",
    )
    boot = 2**61  # as of a clock that was ahead
    path = written(tmp_path / "disk", boot=boot)
    for n_starts in (1, 2):
        with Node.start(config) as node:
            assert node.members()[0].boot_epoch == boot + n_starts
            assert f"boot={boot + n_starts}\n" in path.read_text()
