"""What `GET /` sends, to whom, and under which headers."""

from __future__ import annotations

import re

import pytest
from setuptools import find_packages

from app.page.files import FILES, files_in
from configs.model_folder import PROJECT_ROOT


@pytest.mark.parametrize("path", FILES)
def test_every_file_comes_under_the_strict_headers(server, path: str):
    with server.http() as client:
        answer = client.get(path)
    assert answer.status_code == 200
    assert answer.content == FILES[path].body
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "*" not in policy
    assert {"default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"} <= set(policy.split("; "))
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["content-type"] == FILES[path].media_type


def test_the_page_needs_no_key_and_everything_behind_it_does(start):
    with start(api_keys={"key-a": "alice"}).http() as client:
        assert client.get("/").status_code == 200
        assert client.get("/page/main.js").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_a_file_that_has_not_changed_is_not_sent_again(server):
    with server.http() as client:
        tag = client.get("/").headers["etag"]
        again = client.get("/", headers={"if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get("/", headers={"if-none-match": '"another"'}).status_code == 200
        head = client.head("/")
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/../ingress.py", "/page/%2e%2e/files.py", "/page/index.html"]
)
def test_no_path_leads_out_of_the_folder(server, path: str):
    with server.http() as client:
        answer = client.request("GET", path)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert client.post("/", json={}).status_code == 405


def test_no_file_names_another_host_or_brings_code_in_its_markup():
    texts = {path: file.body.decode() for path, file in FILES.items()}
    for path, text in texts.items():
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)))
        assert hosts <= {"http://www.w3.org"}, path
        if path.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            ), path
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|<style", texts["/"])


def test_the_files_are_part_of_the_package():
    settings = (PROJECT_ROOT / "pyproject.toml").read_text()
    assert '"app.page" = ["static/*"]' in settings
    assert "app.page" in find_packages(str(PROJECT_ROOT), include=["app*"])


def test_what_an_editor_has_left_in_the_folder_is_not_served_and_ends_nothing(tmp_path):
    for name in ("index.html", "a.js", "a.js~", ".a.js.swp", "notes", "b.woff9"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder").mkdir()
    assert set(files_in(tmp_path)) == {"/", "/page/a.js"}
