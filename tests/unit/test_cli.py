"""The command line: what is printed where, and the exit status."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.api.document import openapi_document
from app.cli import main
from app.errors import SettingsError
from app.reference import BEGIN, END, lifecycle_document, settings_table
from app.serve import bind, published_url
from app.settings.sections import HttpSettings


def test_config_prints_the_effective_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is JSON with every section and the values that flags gave."""
    assert main(["config", "--role", "decode", "--cache.pages", "300"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["role"] == "decode"
    assert shown["cache"] == {
        "page_size": 64,
        "pages": 300,
        "dtype": "auto",
        "reuse": "page",
        "eviction": "lhd",
        "slots": 64,
    }
    assert set(shown) >= {"http", "auth", "model", "prefill", "transfer", "deadlines", "limits", "log"}


@pytest.mark.parametrize("command", ["config", "doctor", "serve"])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--role", "prefill", "--cache.page-sise", "64"], "unknown flag: --cache.page-sise"),
        (["--role", "prefill", "--cache.pages", "none"], "cache.pages"),
        (["--role", "prefill", "--cache.pages"], "--cache.pages"),
        ([], "role"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_bad_settings_end_with_2_and_one_line(
    command: str, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that reads settings stops before it does anything, naming the key once."""
    assert main([command, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("kvferry: ")
    assert named in shown.err


@pytest.mark.parametrize("command", [["openapi"], ["lifecycle"], ["settings"]])
def test_commands_without_settings_refuse_flags(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that would have no effect is refused, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--role=prefill"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"kvferry: {command[0]} takes no such argument: --role=prefill\n"
    assert list(tmp_path.iterdir()) == []


def test_openapi_is_written_where_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes openapi/openapi.json below the working folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["openapi"]) == 0
    assert (tmp_path / "openapi" / "openapi.json").read_text() == openapi_document()
    assert capsys.readouterr().out == "wrote openapi/openapi.json\n"


def test_lifecycle_and_settings_print_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands print exactly what the documents contain."""
    assert main(["lifecycle"]) == 0
    assert capsys.readouterr().out == lifecycle_document()
    assert main(["settings"]) == 0
    assert capsys.readouterr().out == settings_table()


def test_reference_brings_the_documents_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what stands between the marks is replaced; elsewhere nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main(["reference"]) == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "docs").mkdir()
    operations = tmp_path / "docs" / "operations.md"
    operations.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert main(["reference"]) == 0
    assert operations.read_text() == f"before\n{BEGIN}{settings_table()}{END}after\n"
    assert (tmp_path / "docs" / "lifecycle.md").read_text() == lifecycle_document()
    assert (tmp_path / "openapi" / "openapi.json").read_text() == openapi_document()


def test_the_module_runs_as_a_program() -> None:
    """`python -m app` passes arguments, output and status through."""
    command = [sys.executable, "-m", "app", "config", "--role", "prefill", "--htp.port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "kvferry: unknown flag: --htp.port\n")


# ---------------------------------------------------------------------- ports


@pytest.mark.case("J5")
def test_the_published_port_is_the_bound_one() -> None:
    """Whatever was wished, the url holds the port on which the node listens."""
    first, moved = bind(HttpSettings())
    with first:
        port = first.getsockname()[1]
        assert not moved
        assert published_url(HttpSettings(), first) == f"http://127.0.0.1:{port}"
        second, moved = bind(HttpSettings(port=port, port_taken="any"))
        with second:
            other = second.getsockname()[1]
            assert moved
            assert other != port
            assert published_url(HttpSettings(port=port), second) == f"http://127.0.0.1:{other}"
            assert published_url(HttpSettings(advertise="prefill"), second) == f"http://prefill:{other}"
            assert published_url(HttpSettings(advertise="::1"), second) == f"http://[::1]:{other}"


def test_a_taken_port_stops_the_start_unless_any_will_do() -> None:
    """The message names the key, the address and the reason."""
    first, _ = bind(HttpSettings())
    with first:
        port = first.getsockname()[1]
        with pytest.raises(SettingsError) as caught:
            bind(HttpSettings(port=port))
    assert caught.value.message == f"http.port: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_foreign_address_stops_the_start_whatever_happens_to_a_taken_port() -> None:
    """`any` is about the port: another port does not help where the host is not this machine's."""
    with pytest.raises(SettingsError) as caught:
        bind(HttpSettings(host="203.0.113.7", port_taken="any"))
    assert caught.value.message.startswith("http.host: cannot listen on 203.0.113.7:0")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EADDRNOTAVAIL


@pytest.mark.case("K3")
def test_eight_nodes_that_wish_for_one_port_get_eight() -> None:
    """A bound port is listened on at once, so that no two nodes can both believe they have it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        wished = free.getsockname()[1]
    listeners = [bind(HttpSettings(port=wished, port_taken="any")) for _ in range(8)]
    try:
        ports = [listener.getsockname()[1] for listener, _ in listeners]
        assert len(set(ports)) == 8
        assert [moved for _, moved in listeners].count(False) <= 1
        for port in ports:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    finally:
        for listener, _ in listeners:
            listener.close()
