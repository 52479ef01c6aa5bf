"""cuFile's settings: JSON with comments, where it lies, and what the environment changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvme_ops.op_builder.machine import Host
from nvme_ops.report import gds
from nvme_ops.report.gds import parse
from nvme_ops.report.gds import read_settings as read
from tests.made_up_gpu import clear_environment, put

# As NVIDIA's own file: comments of both kinds, between and behind values.
COMMENTED = """
{
    // NOTE: applications can override this file
    "logging": { "dir": "/var//log", /* not here */ "level": "ERROR" },  // a path with two slashes
    "properties": {
        "use_pci_p2pdma": true, // the last has a comma too
        "allow_compat_mode": false,
    },
    "note": "a \\"quoted\\" // no comment, ]",
}
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    clear_environment(monkeypatch, tmp_path)
    return Host(tmp_path)


def test_comments_and_trailing_commas_are_skipped_but_not_in_strings() -> None:
    assert parse(COMMENTED) == {
        "logging": {"dir": "/var//log", "level": "ERROR"},
        "properties": {"use_pci_p2pdma": True, "allow_compat_mode": False},
        "note": 'a "quoted" // no comment, ]',
    }


@pytest.mark.parametrize("value", [[], {}, {"a": [1, {"b": "//"}]}, "text", 1])
def test_plain_json_is_itself(value: object) -> None:
    assert parse(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["{", "{'properties': {}}", "{]", "/* never closed"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse(text)


def test_without_a_file_the_defaults_hold(host: Host) -> None:
    found = read(host)
    assert (found.path, found.problem) == (None, "")
    assert (found.allow_compatibility, found.force_compatibility, found.peer_to_peer) == (True, False, False)


def test_the_systems_file_is_read(host: Host) -> None:
    put(host.root, {"etc/cufile.json": COMMENTED})
    found = read(host)
    assert (found.path, found.allow_compatibility, found.peer_to_peer) == ("/etc/cufile.json", False, True)


def test_a_named_file_takes_its_place(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    put(host.root, {"etc/cufile.json": COMMENTED, "mine.json": '{"properties": {"force_compat_mode": true}}'})
    monkeypatch.setenv(gds.NAMED_BY, "/mine.json")
    found = read(host)
    assert (found.path, found.allow_compatibility, found.force_compatibility) == ("/mine.json", True, True)
    assert found.forced_by == "/mine.json"


def test_a_named_file_that_is_not_there_is_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gds.NAMED_BY, "/no/such.json")
    found = read(host)
    assert "/no/such.json: No such file" in found.problem
    assert found.fix == f"unset {gds.NAMED_BY}"


def test_a_file_that_is_no_json_is_said_and_the_defaults_hold(host: Host) -> None:
    put(host.root, {"etc/cufile.json": '{"properties": '})
    found = read(host)
    assert "cannot be read as JSON" in found.problem
    assert found.fix == "correct /etc/cufile.json"
    assert found.allow_compatibility


def test_a_file_that_cannot_be_read_is_said(host: Host) -> None:
    (host.root / "etc/cufile.json").mkdir(parents=True)
    found = read(host)
    assert found.problem == "/etc/cufile.json: Is a directory"
    assert found.fix.startswith("ls -ld /etc/cufile.json")


@pytest.mark.parametrize("text", ["[]", "1", '{"properties": []}', '{"properties": {"allow_compat_mode": "true"}}'])
def test_values_of_another_kind_do_no_harm(host: Host, text: str) -> None:
    put(host.root, {"etc/cufile.json": text})
    assert read(host).allow_compatibility


def test_the_environment_comes_before_the_file(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    put(host.root, {"etc/cufile.json": '{"properties": {"force_compat_mode": true, "use_pci_p2pdma": true}}'})
    monkeypatch.setenv(gds.FORCED_BY, "false")
    monkeypatch.setenv(gds.PEER_TO_PEER_BY, "FALSE")
    found = read(host)
    assert (found.force_compatibility, found.peer_to_peer) == (False, False)
    monkeypatch.setenv(gds.FORCED_BY, "1")
    assert read(host).forced_by == gds.FORCED_BY
