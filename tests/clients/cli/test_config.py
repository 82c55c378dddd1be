"""Configuration: which layer wins, what an error says, and what `genbatch config` shows."""

import json
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.scheduling.scheduler import SchedulerPolicy
from genbatch.actors.service.options import ServiceOptions
from genbatch.clients.cli.main import app
from genbatch.clients.cli.option_flags import LIMITS, SECTIONS, Option, ServiceFlags, markdown_table, options
from genbatch.clients.cli.settings import read_settings
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from genbatch.proto.validation import RequestLimits

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "options.md"


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("GENBATCH_CONFIG", raising=False)
    for option in options().values():
        monkeypatch.delenv(option.variable, raising=False)


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["config", *arguments])
    assert result.exit_code == code, result.output
    return result


def shown(*arguments: str) -> Any:
    return json.loads(run("--json", *arguments).output)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


# Layers


def test_a_file_from_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbfn_ctx = 1024\r\nn_parallel = 2\r\n")
    said = shown("--config", str(file))
    assert (said["n_ctx"]["value"], said["n_parallel"]["value"]) == (1024, 2)


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "c.toml", "n_parallel = 2\nn_ctx = 200\nbatch_size = 2\n")
    monkeypatch.setenv("GENBATCH_N_PARALLEL", "3")
    monkeypatch.setenv("GENBATCH_N_CTX", "300")
    said = shown("--config", file, "--n-parallel", "4")
    assert said["n_parallel"] == {"value": 4, "from": "flag"}
    assert said["n_ctx"] == {"value": 300, "from": "GENBATCH_N_CTX"}
    assert said["batch_size"] == {"value": 2, "from": f"{file}, line 3"}
    assert said["max_batch_tokens"] == {"value": 512, "from": "default"}


def test_a_flag_that_says_the_default_wins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENBATCH_N_PARALLEL", "3")
    monkeypatch.setenv("GENBATCH_MODEL", "other")
    assert shown("smollm2", "--n-parallel", "8")["n_parallel"] == {"value": 8, "from": "flag"}
    assert shown("smollm2")["model"] == {"value": "smollm2", "from": "flag"}
    assert shown()["model"] == {"value": "other", "from": "GENBATCH_MODEL"}


def test_a_flag_may_set_an_option_s_opposite_a_list_or_a_limit() -> None:
    said = shown("--no-fair-share", "--no-block-sharing", "--system-prompt", "Be kind.", "--limit", "max_n=2")
    assert said["fair_share"]["value"] is said["allow_block_sharing"]["value"] is False
    assert said["system_prompts"] == {"value": ["Be kind."], "from": "flag"}
    assert said["limits.max_n"] == {"value": 2, "from": "flag"}
    assert said["limits.max_stop"]["from"] == "default"


def test_limits_have_a_table_of_their_own_and_variables_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GENBATCH_LIMITS__MAX_STOP", "3")
    file = write(tmp_path / "c.toml", 'scheduler_policy = "guaranteed_no_evict"\n\n[limits]\nmax_n = 2\n')
    batcher = read_settings({}, config=Path(file)).batcher()
    assert batcher.limits == RequestLimits(max_n=2, max_stop=3)
    assert batcher.scheduler_policy is SchedulerPolicy.GUARANTEED_NO_EVICT


def test_the_user_s_own_file_is_read_and_one_in_the_working_directory_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("genbatch.toml", "config.toml"):
        write(tmp_path / name, 'scheduler = "evil:Scheduler"\n')
    assert shown()["scheduler"]["from"] == "default"
    write(tmp_path / "elsewhere.toml", "n_ctx = 3\n")
    (tmp_path / "xdg").mkdir()
    write(tmp_path / "xdg" / "genbatch" / "config.toml", "n_ctx = 2\n")
    assert shown()["n_ctx"]["value"] == 2
    monkeypatch.setenv("GENBATCH_CONFIG", str(tmp_path / "elsewhere.toml"))
    assert shown()["n_ctx"]["value"] == 3


def test_with_nothing_said_serve_takes_the_options_defaults() -> None:
    settings = read_settings({})
    assert settings.engine() == EngineOptions()
    assert settings.batcher() == BatcherOptions()
    assert settings.service().engine == "process" and settings.service().bind


# Errors


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_ctx = 1\nn_paralel = 2", ["n_paralel", "no such option", "line 2", "did you mean n_parallel?"]),
        ("n_ctx = 1\n[limits]\nmax_m = 2", ["limits.max_m", "no such option", "line 3"]),
        ("[service]\nbind = 'x'", ["service.bind", "no such option", "line 2"]),
        ('n_parallel = "8"', ["n_parallel", "valid integer", "line 1"]),
        ("n_parallel = true", ["n_parallel", "valid integer"]),
        ("n_parallel = 0", ["n_parallel", "at least 1", "line 1"]),
        ("system_prompts = 'one'", ["system_prompts", "valid array"]),
        ("engine = 'cloud'", ["engine", "'process' or 'thread'"]),
        ("limits = 3", ["limits", "line 1"]),
        ("n_ctx = ?", ["config", "not TOML", "line 1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_the_file_is_told_with_key_and_line(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        settings = read_settings({}, config=Path(write(tmp_path / "c.toml", text)))
        settings.batcher()
    assert "c.toml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_mistake_is_one_line_and_the_exit_code_of_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot read /no/such/file" in run("--config", "/no/such/file", code=2).stderr
    monkeypatch.setenv("GENBATCH_N_CTX", "many")
    assert "error: n_ctx: input should be a valid integer" in run(code=2).stderr
    monkeypatch.setenv("GENBATCH_N_CTX", "9")
    monkeypatch.setenv("GENBATCH_SYSTEM_PROMPTS", "[not JSON")
    assert "system_prompts: is not JSON" in run(code=2).stderr


# What is shown


def test_every_option_is_shown_and_what_nobody_reads_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENBATCH_N_PARALEL", "2")
    monkeypatch.setenv("COLUMNS", "200")
    output = run().output
    for name in options():
        assert name in output
    assert "GENBATCH_N_PARALEL is not an option" in output


def test_a_secret_is_never_shown() -> None:
    secret = Option(name="x_token", owner=ServiceOptions, field="x_token", kind=str, default=None, text="")
    assert secret.is_secret and "1234" not in secret.shown("1234")
    assert not options()["max_batch_tokens"].is_secret


def test_every_field_of_the_options_classes_is_an_option_with_a_text() -> None:
    known = {(option.owner, option.field) for option in options().values()}
    for owner, inner in ((EngineOptions, set()), (BatcherOptions, {LIMITS}), (ServiceOptions, set())):
        names = {field.name for field in fields(owner) if field.init}  # type: ignore[arg-type]
        assert {field for found, field in known if found is owner} == names - inner
    assert {field for owner, field in known if owner is RequestLimits} == set(RequestLimits.__struct_fields__)
    assert all(option.text and not option.text.lower().startswith("see ") for option in options().values())


@pytest.mark.parametrize("name", [name for name, option in options().items() if option.owner is not RequestLimits])
def test_every_option_has_a_flag_whose_help_is_the_options_text(name: str) -> None:
    if name == "model":  # the command's argument
        return
    flags = {parameter.name: parameter for parameter in ServiceFlags.parameters()}
    shown = flags[f"no_{name}"] if options()[name].default is True else flags[name]
    told = shown.annotation.__metadata__[0]
    text = options()[name].text.removesuffix(".")
    assert not told.hidden and told.rich_help_panel
    assert text[1:] in told.help.replace("\\[", "[")
    assert shown.kind is Parameter.KEYWORD_ONLY


def test_a_flag_turns_on_what_the_file_turns_off_and_not_both(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "fair_share = false\nbatch_invariant = true\nuse_cuda_graph = true\n")
    said = shown("--config", file, "--fair-share", "--no-batch-invariant", "--no-cuda-graph")
    assert said["fair_share"] == {"value": True, "from": "flag"}
    assert said["batch_invariant"] == {"value": False, "from": "flag"}
    assert said["use_cuda_graph"] == {"value": False, "from": "flag"}
    assert "fair_share: is turned on and off at once" in run("--fair-share", "--no-fair-share", code=2).stderr


def test_every_limit_of_requests_is_named_in_the_help_of_its_flag() -> None:
    (told,) = [flag.annotation.__metadata__[0].help for flag in ServiceFlags.parameters() if flag.name == "limit"]
    assert all(name in told for name in RequestLimits.__struct_fields__) and RequestLimits in SECTIONS


def test_the_page_of_options_has_the_table_that_the_command_prints() -> None:
    table = run("--markdown").output
    assert table == markdown_table() and "| `n_parallel` | 8 | sequences decoded at once. A GPU" in table
    assert table in PAGE.read_text(), "paste what `genbatch config --markdown` prints"


def test_a_value_is_shown_as_a_person_reads_it() -> None:
    option = next(one for one in options().values() if one.field == "system_prompts")
    assert option.shown(()) == "none" and option.shown(("a", "b")) == "'a', 'b'"
    assert option.shown(True) == "true" and option.shown(0.25) == "0.25" and option.shown(None) == "none"
