"""The command line against a server: what it prints, and that the token is in none of it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from orchestrator import cli
from orchestrator.service import tokens
from tests.service.world import World


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command line with a token; returns (status, what it printed), which never has the token."""

    def run(token, *words):
        monkeypatch.setenv("PARO_TOKEN", token)
        status = cli.main(words)
        said = "".join(capsys.readouterr())
        assert token not in said and "Traceback" not in said
        return status, said

    return run


@contextmanager
def answering(status, headers=(), body=b"{}"):
    """(address, requests seen) of a server that gives everybody this answer."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(dict(self.headers))
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_add_list_and_remove_work_on_the_servers_queue(tmp_path, call):
    world = World(tmp_path)
    both = tokens.add(world.service.tokens.path, "both", ["read", "run"])
    with world.on_loopback() as port:
        server = f"server=http://127.0.0.1:{port}"
        status, said = call(both, "schedule", "add", server, "+experiment=zpe", "box=cpu", "priority=3", "key=k")
        assert status == 0 and said.startswith("job 1: queued, at most ")
        assert call(both, "schedule", "add", server, "+experiment=zpe", "box=cpu", "priority=3", "key=k")[0] == 0
        status, said = call(both, "schedule", "list", server, "--json")
        (job,) = json.loads(said)
        assert status == 0 and (job["priority"], job["by"]) == (3, "token both") and str(tmp_path) not in said
        assert "zpe" in call(both, "schedule", "list", server)[1]
        assert call(both, "schedule", "remove", server, "1") == (0, "job 1 is cancelled\n")
        assert "nothing is queued" in call(both, "schedule", "list", server)[1]
        assert call(both, "schedule", "remove", server, "7")[0] == 2
    assert [job.state for job in world.queue.list()] == ["cancelled"]


def test_a_server_is_told_which_box(call):
    status, said = call("paro_secret", "schedule", "add", "server=http://127.0.0.1:1", "+experiment=zpe")
    assert status == 2 and said == (
        "orchestrator: no box given: a server may have several; add box=NAME, for example box=cpu\n"
    )


def test_a_wrong_token_or_one_without_the_scope_is_one_line(tmp_path, call):
    world = World(tmp_path)
    with world.on_loopback() as port:
        server = f"server=http://127.0.0.1:{port}"
        status, said = call("paro_" + "x" * 43, "schedule", "list", server)
        assert status == 2 and said.startswith("orchestrator: server: 401: no valid token") and said.count("\n") == 1
        status, said = call(world.tokens["read"], "schedule", "add", server, "+experiment=zpe", "box=cpu")
        assert status == 2 and "403: this needs a token with the scope run" in said and said.count("\n") == 1
    assert world.queue.list() == []


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:1", "http://127.0.0.1:99999", "ftp://127.0.0.1", "127.0.0.1:80", "http://a:b@127.0.0.1:1", ""],
)
@pytest.mark.parametrize("verb", [["list"], ["add", "+experiment=zpe", "box=cpu"], ["remove", "1"]])
def test_no_server_is_one_line(call, address, verb):
    status, said = call("paro_secret", "schedule", verb[0], f"server={address}", *verb[1:])
    assert status in (1, 2) and said.count("\n") == 1 and "a:b" not in said


def test_a_redirect_is_not_followed_so_that_the_token_goes_nowhere_else(call):
    with answering(200) as (elsewhere, there), answering(302, [("Location", f"{elsewhere}/v1/jobs")]) as (url, here):
        for words in (["list"], ["remove", "1"], ["add", "+experiment=zpe", "box=cpu"]):
            status, _ = call("paro_secret", "schedule", words[0], f"server={url}", *words[1:])
            assert status != 0
    assert here and not there


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"id": 1}', b'[{"id": "x"}]', b"null", b"\xff"])
def test_what_is_no_answer_of_this_api_is_one_line(call, body):
    with answering(200, body=body) as (url, _):
        for words in (["list"], ["remove", "1"]):
            status, said = call("paro_secret", "schedule", words[0], f"server={url}", *words[1:])
            assert status == 1 and said.count("\n") == 1 and "this API" in said


def test_a_token_file_that_others_can_read_is_refused(call, tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("paro_secret")
    file.chmod(0o644)
    monkeypatch.setenv("PARO_TOKEN_FILE", str(file))
    monkeypatch.delenv("PARO_TOKEN", raising=False)
    assert cli.main(["schedule", "list", "server=http://127.0.0.1:1"]) == 2


def test_serve_does_not_start_without_tokens_and_says_how_to_make_one(tmp_path, capsys):
    places = [f"paths.{name}={tmp_path / name}" for name in ("state", "tracking", "cache")]
    assert cli.main(["serve", "http.port=0", *places]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "token add NAME scopes=read" in said
