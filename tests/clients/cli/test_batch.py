"""`genbatch batch` over a real tiny model: results for good lines, errors for bad ones, and going on after a kill."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from genbatch.clients.cli.batch import BatchFile
from genbatch.clients.cli.main import app
from genbatch.proto.errors import InvalidRequest

LINES = [
    '{"id": "a", "token_ids": [5, 6, 7], "max_tokens": 4}',
    '{"id": "b", "prompt": "x", "max_tokens": 0}',
    "not json",
    "",
    '{"prompt": "hello", "max_tokens": 3, "ignore_eos": true}',
    '{"id": 9, "prompt": "hello", "colour": 1}',
]


@pytest.fixture
def run(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Any:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(LINES))

    def command() -> list[dict[str, Any]]:
        model = ["--model", str(tiny_model_dir("llama")), "--dtype", "float32", "--n-gpu-layers", "0"]
        done = CliRunner().invoke(app, ["batch", str(source), *model])
        assert done.exit_code == 1
        told = done.stderr
        assert f"2 of 5 requests are answered, in {tmp_path}/in.results.jsonl" in told
        assert f"3 of {source} failed:" in told
        for place, reason in ((2, "max_tokens"), (3, "not JSON"), (6, "colour")):
            assert any(line.startswith(f"  line {place}: ") and reason in line for line in told.splitlines()), told
        return [json.loads(line) for line in (tmp_path / "in.results.jsonl").read_text().splitlines()]

    return command


def test_good_lines_get_results_bad_ones_errors_and_a_killed_run_goes_on(
    run: Any, tmp_path: Path, oracle: Callable[[str], Any]
) -> None:
    found = {entry["line"]: entry for entry in run()}
    assert sorted(found) == [1, 2, 3, 5, 6], "lines count as in an editor"
    assert found[1]["id"] == "a"
    assert found[1]["result"]["token_ids"] == oracle("llama").generate([5, 6, 7], 4)
    assert found[2]["error"]["field"] == "max_tokens"
    assert "JSON" in found[3]["error"]["message"]
    assert found[5]["result"]["usage"]["completion_tokens"] == 3
    assert found[6]["error"]["field"] == "colour"
    # As a kill leaves it: two lines whole, a third cut short.
    target = tmp_path / "in.results.jsonl"
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:2]) + whole[2][:10])
    again = run()
    assert sorted(entry["line"] for entry in again) == [1, 2, 3, 5, 6]
    assert target.read_bytes().splitlines(keepends=True)[:2] == whole[:2]


def test_a_refusal_that_passes_with_time_is_tried_again(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    target.write_text(
        '{"line": 1, "id": null, "error": {"code": "queue_full", "message": "", "retry_after_ms": 5}}\n'
        '{"line": 2, "id": null, "error": {"code": "invalid_request", "message": ""}}\n'
    )
    file = BatchFile(source, target)
    assert [number for number, _ in file.todo()] == [1]
    assert list(file.failed) == [2]


def test_ends_of_lines_within_a_string_end_no_request(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\n', encoding="utf-8", newline="")
    lines = [line for _, line in BatchFile(source, tmp_path / "out.jsonl").todo()]
    assert [BatchFile.parse(line)["prompt"] for line in lines] == ["a\u2028b\x85c", "d"]


def test_a_byte_order_mark_is_no_part_of_the_first_request(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    [(number, line)] = BatchFile(source, tmp_path / "out.jsonl").todo()
    assert (number, BatchFile.parse(line)) == (1, {"prompt": "a"})


@pytest.mark.parametrize("text", ["my notes", '{"line":"x"}\n', "[1]\n", '{"x":1}\n{"line":3}\n'])
def test_a_file_of_something_else_is_not_taken_for_results_and_stays(text: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "notes"
    source.write_text('{"prompt": "a"}\n')
    target.write_text(text)
    said = CliRunner().invoke(app, ["batch", str(source), "-o", str(target), "--connect", "ipc:///no/such/socket"])
    assert said.exit_code == 2 and "contains something other than results" in " ".join(said.stderr.split())
    assert target.read_text() == text


def test_what_cannot_be_read_or_written_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    source, folder = tmp_path / "in.jsonl", tmp_path / "folder"
    folder.mkdir()
    source.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n')

    def told(*arguments: str) -> str:
        said = CliRunner().invoke(app, ["batch", *arguments, "--connect", "ipc:///no/such/socket"])
        assert (said.exit_code == 2 and said.exception is None) or isinstance(said.exception, SystemExit)
        return " ".join(said.stderr.split())

    assert "in.jsonl, line 3: not text in UTF-8" in told(str(source))
    source.write_text('{"prompt": "a"}\n')
    assert "cannot be written: Is a directory" in told(str(source), "-o", str(folder))
    assert "cannot be written: No such file or directory" in told(str(source), "-o", str(tmp_path / "no" / "out"))
    assert "cannot share a file" in told(str(source), "-o", str(source))


def test_many_failed_lines_are_counted_and_none_is_no_failure(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n" + "no\n" * 13)
    file = BatchFile(source, tmp_path / "out.jsonl")
    assert file.summary() == f"0 of 13 requests are answered, in {tmp_path}/out.jsonl"
    for number in range(2, 15):
        file.write(number, None, InvalidRequest(None, "not JSON"))
    told = file.summary().splitlines()
    assert told[2] == "  line 2: not JSON" and len(told) == 13
    assert told[-1] == f"  and 3 more, each with its error in {tmp_path}/out.jsonl"


def test_openais_batch_files_are_answered_in_their_own_form(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, oracle: Callable[[str], Any]
) -> None:
    def line(custom_id: str, url: str, body: dict[str, Any], method: str = "POST") -> str:
        return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})

    chat = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama"), model)
    lines = [
        line("chat", "/v1/chat/completions", chat),
        line("text", "/v1/completions", {"model": "model", "prompt": [5, 6, 7], "max_tokens": 4}),
        line("other", "/v1/chat/completions", {**chat, "model": "gpt"}),
        line("path", "/v1/files", {}),
        line("get", "/v1/completions", {}, "GET"),
        line("streams", "/v1/completions", {"stream": True}),
        '{"custom_id": 5}',
    ]
    source.write_text("\n".join(lines))
    command = ["batch", str(source), "-o", str(target), "--model", str(model), "--dtype", "float32"]
    done = CliRunner().invoke(app, [*command, "--n-gpu-layers", "0"])
    assert done.exit_code == 1 and "2 of 7 requests are answered" in done.stderr, done.stderr
    found = {entry["custom_id"]: entry for entry in map(json.loads, target.read_text().splitlines())}
    assert found["chat"]["response"]["status_code"] == 200 and found["chat"]["error"] is None
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["text"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["other"]["response"]["status_code"] == 404
    assert "gpt" in found["other"]["response"]["body"]["error"]["message"]
    assert found["path"]["error"]["field"] == "url" and found["get"]["error"]["field"] == "method"
    assert found["streams"]["error"]["field"] == "body.stream" and found[5]["error"]["field"] == "custom_id"
    assert [number for number, _ in BatchFile(source, target).todo()] == []
