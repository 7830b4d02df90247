"""Events: a list, log messages, lines of a file."""

import json
import logging
import re
from typing import get_args

import pytest

from curvadion.metering.events import WARNINGS, Event, EventLog, Kind
from support.documents.doc_blocks import ROOT

JOINED = Event("joined", "b has come", member="b", replica="a", step=7, opening=2)
FAILED = Event("failed", "no answer", member="a", replica="a", step=8, opening=2, seconds=0.5)


@pytest.fixture(autouse=True)
def logs(monkeypatch):
    """Tests of frameworks turn logging off in the whole process."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)


def test_events_reach_the_list_the_logger_and_the_file(tmp_path, caplog):
    log = EventLog(tmp_path / "events.jsonl")
    with caplog.at_level(logging.INFO, "curvadion"):
        log.add(JOINED)
        log.add(FAILED)
    assert log.events == [JOINED, FAILED]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "b has come (replica a, step 7, opening 2)"),
        ("WARNING", "no answer (replica a, step 8, opening 2)"),
    ]
    lines = (tmp_path / "events.jsonl").read_text("utf-8").splitlines()
    assert [Event(**json.loads(line)) for line in lines] == log.events


def test_only_the_first_rank_of_a_replica_tells_all(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("CURVADION_EVENT_LOG", str(tmp_path / "events.jsonl"))
    with caplog.at_level(logging.INFO, "curvadion"):
        for first in (True, False):
            log = EventLog(first=first)
            log.add(JOINED)
            log.add(FAILED)
            assert len(log.events) == 2
    assert len((tmp_path / "events.jsonl").read_text("utf-8").splitlines()) == 2
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]


def test_a_file_that_cannot_be_opened_is_an_error_and_a_full_disk_is_not(tmp_path, caplog):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        EventLog(tmp_path / "nowhere" / "events.jsonl")
    log = EventLog(tmp_path / "events.jsonl")
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "events.jsonl").mkdir()
    log.add(JOINED)
    assert "could not be written" in caplog.text
    assert log.events == [JOINED]


def test_the_page_lists_all_kinds():
    page = (ROOT / "docs" / "elastic.md").read_text("utf-8")
    table = page.split("| `kind` |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w ]+)`( \(warning\))? \|", table, re.MULTILINE)
    assert [kind for kind, _ in rows] == list(get_args(Kind))
    assert [kind for kind, warns in rows if warns] == list(WARNINGS)
    [example] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert Event(**json.loads(example)).kind == "copied"
