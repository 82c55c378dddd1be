"""The script of the figures runs, and what it counts is there."""

from pathlib import Path

import pytest

from tests import figures
from tests.traced import trace_openai_stream, trace_zeromq_stream


def test_the_table_is_printed_with_todays_values(capsys: pytest.CaptureFixture[str]) -> None:
    figures.main()
    printed = capsys.readouterr().out
    rows = printed.split("\n\n")[0].splitlines()
    assert len(rows) == 12 and all(row.split() for row in rows)
    assert "files in a circle" in printed and "names with two meanings" in printed


def test_a_trace_sees_the_request_and_what_checks_it() -> None:
    chat, stream = trace_openai_stream(), trace_zeromq_stream()
    for trace in (chat, stream):
        assert {"GenerateRequest", "SamplingParams"} <= set(trace.shapes), trace.shapes
        assert any("validate_request" in check for check in trace.checks), trace.checks
        assert {"actors/batcher/batcher.py", "nif/context/context.py", "proto/messages.py"} <= trace.files
    assert "actors/gateways/http/openai_request.py" in chat.files
    assert len(chat.shapes) <= 10, chat.shapes
    assert len(chat.checks) == 2, f"the door checks the body's types, the Batcher the ranges: {chat.checks}"
    assert "clients/remote.py" in stream.files and "clients/remote.py" not in chat.files


UNUSED_FEATURES = {
    *(
        f"actors/batcher/{name}.py"
        for name in ("beam_search", "calls", "drafting", "embeddings", "options", "thinking")
    ),
    *(f"nif/sampling/{name}.py" for name in ("constraints", "device_draws", "grammar", "prompt_lookup")),
    *("actors/recording/recorder.py", "nif/context/overlapped_run.py", "nif/text/tools.py"),
    *("nif/kv/disk_cache.py", "nif/kv/offload.py"),
}


def test_a_request_enters_few_files_and_none_of_a_feature_that_it_does_not_use() -> None:
    """ADR 106 has the files."""
    for trace, most in ((trace_openai_stream(), 45), (trace_zeromq_stream(), 38)):
        assert not trace.files & UNUSED_FEATURES
        assert len(trace.files) <= most, sorted(trace.files)


def test_a_method_and_a_sampling_parameter_are_written_in_at_most_five_files() -> None:
    method = figures.files_of_a_method()
    assert len(method) <= 5, method
    parameter = figures.files_that_write({"min_p"})
    assert len(parameter) <= 5, parameter


def test_a_name_is_found_however_it_is_written_and_kinds_are_told_by_tests(tmp_path: Path) -> None:
    for layer in figures.LAYERS:
        (tmp_path / layer).mkdir()
    texts = ("x.min_p", "f(min_p=1)", "def f(min_p): pass", 'FIELDS = ["min_p"]', "# min_p", '"of min_p and others"')
    for number, text in enumerate(texts):
        (tmp_path / "nif" / f"{number}.py").write_text(text)
    assert figures.files_that_write({"min_p"}, tmp_path) == [f"nif/{number}.py" for number in range(4)]
    (tmp_path / "nif" / "0.py").write_text("if isinstance(a, B) and a.beams is None and not a.donor: a.lookup = 1")
    assert figures.kind_checks("nif", tmp_path) == (1, 2)
