"""What is done where a process may open few files. That HAProxy then starts: `test_haproxy.py`."""

from __future__ import annotations

import resource

import pytest

from app.launch.surroundings import files
from configs.settings import SettingsError


@pytest.fixture
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, request.param))
    return int(request.param)


@pytest.mark.parametrize("limit", [256, files.FEWEST - 1], indirect=True)
def test_too_few_are_refused_in_a_sentence_that_says_what_to_raise(limit: int) -> None:
    with pytest.raises(SettingsError, match=rf"may open {limit} files .* needs {files.FEWEST}; raise the limit"):
        files.require_files()


@pytest.mark.parametrize("limit", [files.FEWEST, 4096, 10_000], indirect=True)
def test_fewer_connections_are_taken_where_fewer_files_may_be_opened_and_that_is_said(limit: int) -> None:
    files.require_files()
    connections = int(files.connections_environment()["RAY_SERVE_HAPROXY_MAXCONN"])
    assert limit / 4 < connections * 2.5 + 34 < limit
    assert str(connections) in str(files.warning())


@pytest.mark.parametrize("limit", [20_000, resource.RLIM_INFINITY], indirect=True)
def test_otherwise_nothing_is_changed_or_said(limit: int) -> None:
    files.require_files()
    assert files.connections_environment() == {}
    assert files.warning() is None


@pytest.mark.parametrize("limit", [4096], indirect=True)
def test_a_number_of_the_users_that_fits_stays(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "100")
    assert files.connections_environment() == {}
