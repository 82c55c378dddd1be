"""The command line: what flags reach, what errors look like, and what is left after a signal."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.gateways.addresses import default_address
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import PauseOrder, SchedulerPolicy
from genbatch.actors.service.on_demand import ModelCatalog
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.generate import _print_summary
from genbatch.clients.cli.main import app
from genbatch.clients.cli.settings import read_settings
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import ModelError
from genbatch.proto.messages import Result as GenerateResult
from genbatch.proto.messages import Usage
from genbatch.proto.validation import RequestLimits

GENBATCH = [sys.executable, "-c", "from genbatch.clients.cli.main import main; main()"]
# Longer than any of them takes, so that a hanging one fails instead of holding up the rest.
TIMEOUT_S = 600.0


@pytest.fixture
def tiny(tiny_model_dir: Callable[[str], Path]) -> list[str]:
    """Flags of a private service over a tiny model."""
    return ["--model", str(tiny_model_dir("llama")), "--dtype", "float32", "--n-gpu-layers", "0", "--n-ctx", "512"]


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


# Flags


def test_help_names_every_command_and_each_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "serve", "generate", "chat", "stats"):
        assert command in result.output
        assert "Example" in run(command, "--help").output


def test_version_is_printed() -> None:
    assert run("--version").output.startswith("genbatch 0.")


def test_the_flags_defaults_are_the_options_defaults() -> None:
    settings = read_settings({})
    assert settings.engine() == EngineOptions()
    assert settings.batcher() == BatcherOptions()
    # What only a program of its own has: an address, and an engine that it outlives.
    assert settings.service() == ServiceOptions(bind=default_address(), engine="process")


def test_every_option_of_serve_reaches_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineOptions(
        model_path="some",
        served_model_name="shown",
        chat_template="some.jinja",
        dtype="bfloat16",
        n_gpu_layers=0,
        main_gpu=1,
        runner="torch",
        quantize="int8",
        pooling="mean",
        lora=("one=some/dir", "two=other"),
        max_loras=4,
        max_lora_rank=16,
        draft="small.gguf",
        kv_cache_dtype="int8",
        weights_cache=1.5,
        prefix_cache_dir="some/kv",
        prefix_cache_space=2.5,
        n_threads=3,
        tensor_parallel=2,
        use_cuda_graph=True,
        q_padding_interval_size=4,
        kv_padding_interval_size=128,
        max_cached_graphs=9,
        batch_invariant=True,
        n_ctx=100,
        num_blocks=7,
        max_tokens_in_cache=90,
        max_memory_percent=0.5,
        block_size=8,
        cap_per_sequence=True,
        allow_block_sharing=False,
    )
    batcher = BatcherOptions(
        n_parallel=3,
        batch_size=2,
        batch_timeout=7.5,
        batch_quiet=1.25,
        kept_prefix_share=0.4,
        max_batch_tokens=99,
        target_inter_token_latency_ms=15.5,
        max_queue=5,
        max_client_queue_share=0.25,
        max_client_open=1.5,
        fair_share=False,
        priority_ageing_s=12.0,
        default_deadline_s=33.0,
        scheduler="prefill_first",
        scheduler_policy=SchedulerPolicy.MAX_UTILIZATION,
        batching_type=BatchingType.INFLIGHT_BATCHING,
        cache_budget=11,
        enable_chunked_context=False,
        margin=0.3,
        pause_order=PauseOrder.OLDEST,
        max_pauses=5,
        async_batching=False,
        prompt_lookup=False,
        strip_billing_header=False,
        cpu_offload_space=1.5,
        system_prompts=("Be brief.", "Be kind."),
        max_held_prompts=6,
        stall_s=4.5,
        max_answer_s=90.0,
        session_dir="some/sessions",
        session_space=3.5,
        record="the.flight",
        record_limit=77,
        limits=RequestLimits(max_n=2, max_deadline_s=9.0),
    )
    service = ServiceOptions(
        bind="ipc:///tmp/x",
        rpc_bind="unix:///tmp/y",
        http="127.0.0.1:9",
        metrics="127.0.0.1:10",
        http_insecure=True,
        http_strict=True,
        allowed_hosts=("gate",),
        allowed_origins=("https://chat.example",),
        batch_dir="the/batches",
        keep_alive=12.5,
        model_memory=3.5,
        take_over=True,
        engine="process",
        keys="the/keys",
        tokens="the/tokens",
        tls_cert="cert.pem",
        tls_key="key.pem",
        spare_engine=True,
        shutdown_timeout_s=2.0,
        max_restarts=7,
        restart_window_s=60.0,
        log_format="json",
        log_level="error",
        otel=True,
    )
    # `models` says what is served, and has a test of its own (test_models_option.py).
    for chosen, plain in ((engine, EngineOptions()), (batcher, BatcherOptions()), (service, ServiceOptions())):
        same = {field.name for field in fields(chosen) if getattr(chosen, field.name) == getattr(plain, field.name)}
        assert same <= {"scheduler_policy", "models"}, "an option without a flag, or one that is not tried here"
    flags = {
        "bind": "ipc:///tmp/x",
        "rpc-bind": "unix:///tmp/y",
        "http": "127.0.0.1:9",
        "metrics": "127.0.0.1:10",
        "allowed-host": "gate",
        "allowed-origin": "https://chat.example",
        "batch-dir": "the/batches",
        "keep-alive": "12.5",
        "model-memory": "3.5",
        "engine": "process",
        "keys": "the/keys",
        "tokens": "the/tokens",
        "tls-cert": "cert.pem",
        "tls-key": "key.pem",
        "shutdown-timeout-s": 2.0,
        "max-restarts": 7,
        "restart-window-s": 60.0,
        "log-format": "json",
        "log-level": "error",
        "served-model-name": "shown",
        "chat-template": "some.jinja",
        "dtype": "bfloat16",
        "n-gpu-layers": 0,
        "main-gpu": 1,
        "runner": "torch",
        "quantize": "int8",
        "pooling": "mean",
        "max-loras": 4,
        "max-lora-rank": 16,
        "n-threads": 3,
        "tensor-parallel": 2,
        "q-padding-interval-size": 4,
        "kv-padding-interval-size": 128,
        "max-cached-graphs": 9,
        "draft": "small.gguf",
        "kv-cache-dtype": "int8",
        "weights-cache": 1.5,
        "prefix-cache-dir": "some/kv",
        "prefix-cache-space": 2.5,
        "n-ctx": 100,
        "num-blocks": 7,
        "max-tokens-in-cache": 90,
        "max-memory-percent": 0.5,
        "block-size": 8,
        "n-parallel": 3,
        "batch-size": 2,
        "batch-timeout": 7.5,
        "batch-quiet": 1.25,
        "kept-prefix-share": 0.4,
        "max-batch-tokens": 99,
        "max-queue": 5,
        "max-client-queue-share": 0.25,
        "max-client-open": 1.5,
        "priority-ageing-s": 12,
        "default-deadline-s": 33,
        "target-inter-token-latency-ms": 15.5,
        "scheduler": "prefill_first",
        "scheduler-policy": "max_utilization",
        "batching-type": "inflightbatching",
        "cache-budget": 11,
        "margin": 0.3,
        "pause-order": "oldest",
        "max-pauses": 5,
        "cpu-offload-space": 1.5,
        "max-held-prompts": 6,
        "max-answer-s": "90",
        "stall-s": 4.5,
        "session-dir": "some/sessions",
        "session-space": 3.5,
        "record": "the.flight",
        "record-limit": 77,
    }
    given = [f"--{name}={value}" for name, value in flags.items()]
    given += ["--use-cuda-graph", "--cap-per-sequence", "--no-block-sharing", "--no-chunked-context", "--no-fair-share"]
    given += ["--http-insecure", "--http-strict", "--lora=one=some/dir", "--lora=two=other"]
    given += [
        "--no-async-batching",
        "--no-strip-billing-header",
        "--no-prompt-lookup",
        "--otel",
        "--batch-invariant",
        "--spare-engine",
        "--take-over",
    ]
    given += ["--system-prompt=Be brief.", "--system-prompt=Be kind.", "--limit=max_n=2", "--limit=max_deadline_s=9"]
    opened = recorded_service(monkeypatch)
    result = run("serve", "some", *given)
    assert "the end" in result.stderr
    assert opened == [(engine, batcher, service)]


def test_the_other_policy_has_a_flag_value_too(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = recorded_service(monkeypatch)
    run("serve", "--scheduler-policy", "guaranteed_no_evict")
    assert opened[0][1].scheduler_policy is SchedulerPolicy.GUARANTEED_NO_EVICT


def recorded_service(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the service by one that notes what it is opened with, and fails."""
    opened: list[Any] = []

    def open_service(catalog: ModelCatalog, batcher: BatcherOptions, service: ServiceOptions, **more: object) -> None:
        opened.append((*catalog.models, batcher, service))
        raise ModelError("some", "the end")

    monkeypatch.setattr("genbatch.actors.service.processes.open_processes", open_service)
    return opened


# Errors


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["serve", "--n-ctx", "-1"], "n_ctx", 2),
        (["serve", "--batch-size", "-1"], "batch_size", 2),
        (["serve", "--margin", "2"], "margin", 2),
        (["serve", "--limit", "max_n"], "limit", 2),
        (["serve", "--limit", "nothing=1"], "limit", 2),
        (["serve", "--limit", "max_n=many"], "limit", 2),
        (["serve", "--runner", "none"], "runner", 2),
        (["serve", "--max-restarts", "-1"], "max_restarts", 2),
        (["serve", "--dtype", "int3"], "dtype", 2),
        (["serve", "/no/such/model"], "/no/such/model", 2),
        (["demo", "/no/such/model"], "/no/such/model", 2),
        (["generate", "x", "--model", "/no/such/model"], "/no/such/model", 2),
        (["generate", "x", "--raw", "--system", "y"], "system", 2),
        (["generate", "x", "--connect", "ipc:///tmp/x", "--n-ctx", "9"], "n_ctx", 2),
        (["generate", "x", "--connect", "ipc:///tmp/x", "--dtype", "float32"], "dtype", 2),
        (["stats", "--connect", "nowhere"], "nowhere", 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], message: str, code: int) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in result.output


def test_a_request_that_is_refused_is_one_line_that_names_the_parameter(tiny: list[str]) -> None:
    result = run("generate", "x", "--temperature", "-1", *tiny)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: temperature: ")
    assert result.stdout == ""


def test_an_unknown_flag_is_a_usage_error() -> None:
    assert run("serve", "--no-such-flag").exit_code == 2


# A private service


def test_generate_streams_the_text_that_the_model_gives(tiny: list[str], oracle: Callable[[str], Any]) -> None:
    whole = json.loads(run("generate", "The capital", "--raw", "--json", "--max-tokens", "6", *tiny).stdout)
    assert whole["usage"]["completion_tokens"] == 6
    streamed = run("generate", "-", "--raw", "--max-tokens", "6", *tiny, stdin="The capital")
    assert streamed.exit_code == 0
    assert streamed.stdout == whole["text"] + "\n"


def test_generate_puts_the_system_prompt_in_front(tiny: list[str]) -> None:
    plain, longer = (
        json.loads(run("generate", "Hi", "--json", "--max-tokens", "1", *flags, *tiny).stdout)["usage"]["prompt_tokens"]
        for flags in ([], ["--system", "Be brief."])
    )
    assert longer > plain


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_person_is_told_how_fast_an_answer_was_and_a_pipe_is_not(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # without colours
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    _print_summary(GenerateResult(text="abc", token_ids=[1, 2, 3], finish_reason="length", usage=usage), 2.0)
    printed = capsys.readouterr()
    assert ("length: 3 tokens in 2.0 s, 1.5 tok/s" in printed.err) is is_terminal
    assert printed.out == "", "standard output is the answer's"


def test_the_demo_answers_eight_prompts_over_zeromq_and_shares_the_system_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: object
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run("demo", "--max-tokens", "3", "--n-gpu-layers", "0")
    assert result.exit_code == 0, result.output
    assert "tok/s in all: 24 tokens" in result.stdout
    shared, prompts = (int(word) for word in result.stdout.splitlines()[-1].split() if word.isdecimal())
    assert 0 < shared < prompts
    assert not list(tmp_path.iterdir())


# Signals


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, which must be empty afterwards."""
    with subprocess.Popen(
        [*GENBATCH, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    ) as process:
        try:
            yield process
            process.wait(TIMEOUT_S)
            until_empty(process.pid)
        finally:
            process.kill()


def until_empty(group: int) -> None:
    """Children that read from a pipe end soon after the process that wrote to it."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a process of the command is left")


def lines_until(process: subprocess.Popen[str], wanted: str) -> str:
    """The output up to the first line that has `wanted`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if wanted in line:
            return seen
    raise AssertionError(f"no {wanted!r} in:\n{seen}")


def rest_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


@pytest.mark.parametrize("moment", ["Starting", "Loading the model", "is ready"])
def test_ctrl_c_in_the_demo_leaves_nothing(moment: str, tmp_path: Path, smollm2: object) -> None:
    with started("demo", "--max-tokens", "500", "--n-gpu-layers", "0", TMPDIR=str(tmp_path)) as process:
        lines_until(process, moment)
        process.send_signal(signal.SIGINT)
        rest = rest_of(process)
    assert process.returncode == 130
    assert "Traceback" not in rest and "error" not in rest
    assert not list(tmp_path.iterdir())


def test_ctrl_c_in_generate_leaves_no_process(tiny: list[str]) -> None:
    with started("generate", "Hello", *tiny) as process:
        lines_until(process, "Starting")
        process.send_signal(signal.SIGINT)
        rest = rest_of(process)
    assert process.returncode == 130
    assert "Traceback" not in rest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux' /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config", "--markdown"]])
def test_an_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*GENBATCH, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == ["error: standard output cannot be written: No space left on device"]


def test_commands_and_their_processes_run_without_standard_files(tiny: list[str]) -> None:
    # Without the files, the first sockets of the service would get the numbers 0 to 2.
    shell = f"{shlex.join([*GENBATCH, 'generate', 'Hello', '--max-tokens', '2', *tiny])} <&- >&- 2>&-"
    ended = subprocess.run(["sh", "-c", shell], check=False, timeout=TIMEOUT_S)
    assert ended.returncode == 0


def test_an_encoding_without_the_characters_of_an_answer_replaces_them(tiny: list[str]) -> None:
    with started("generate", "Hello", "--regex", "a世b", *tiny, PYTHONIOENCODING="ascii") as process:
        rest = rest_of(process)
    assert process.returncode == 0 and rest.endswith("a?b\n")


def test_commands_run_without_docstrings() -> None:
    for arguments in (["config"], ["generate", "--help"]):
        optimized = [sys.executable, "-OO", *GENBATCH[1:], *arguments]
        assert subprocess.run(optimized, stdout=subprocess.DEVNULL, check=False).returncode == 0
