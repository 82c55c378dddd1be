"""The conversation: what the model is given, and what Ctrl-C and the end of the input do.

`genbatch chat --session`: the conversation goes on in the next run, and what is evaluated is not evaluated again.
"""

import fcntl
import io
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from genbatch.clients.cli.chat import Conversation, ConversationStore, Session, SessionFile, SessionFileError
from genbatch.clients.cli.main import app
from genbatch.clients.in_process import open_batcher
from genbatch.clients.interface import MessageLike
from genbatch.proto.errors import InvalidRequest, PromptTooLong, Unavailable
from genbatch.proto.messages import FinishReason, Message, Result, Token, Usage


class ScriptedClient:
    """Answers "one two" to everything; interrupts itself after "one" when told "never end"."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []
        self.limits: list[int | None] = []

    @asynccontextmanager
    async def stream(self, *, messages: list[Message], **parameters: Any) -> AsyncIterator["ScriptedStream"]:
        self.seen.append(messages)
        self.limits.append(parameters["max_tokens"])
        asked = messages[-1].content
        if asked == "wrong":
            raise InvalidRequest("temperature", "is wrong")
        if asked == "too long":
            raise PromptTooLong("there is no room")
        num_tokens = parameters["max_tokens"] if asked == "much" else 2
        reason: FinishReason = "length" if asked in ("much", "nearly full") else "stop"
        yield ScriptedStream(self._tokens(endless=asked == "never end"), reason, num_tokens)

    async def _tokens(self, endless: bool) -> AsyncIterator[Token]:
        yield Token(text="one", token_id=1, index=0)
        if endless:
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        yield Token(text=" two", token_id=2, index=1)


@dataclass
class ScriptedStream:
    """Its tokens, and then why it ended."""

    tokens: AsyncIterator[Token]
    reason: FinishReason
    num_tokens: int

    def __aiter__(self) -> AsyncIterator[Token]:
        return self.tokens

    @property
    def result(self) -> Result:
        return Result(
            text="one two",
            token_ids=[1, 2],
            finish_reason=self.reason,
            usage=Usage(prompt_tokens=1, completion_tokens=self.num_tokens, cached_tokens=0),
        )


async def talk(
    monkeypatch: pytest.MonkeyPatch, entered: str, system: str | None = None, max_tokens: int | None = None
) -> ScriptedClient:
    monkeypatch.setattr(sys, "stdin", io.StringIO(entered))
    client = ScriptedClient()
    await Conversation(client, system, {"max_tokens": max_tokens}).run()  # type: ignore[arg-type]
    return client


def turn(role: str, content: str) -> Message:
    return Message(role=role, content=content)


@pytest.mark.trio
async def test_each_answer_is_given_the_turns_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await talk(monkeypatch, "hello\n\nmore\n", system="Be brief.")
    first = [turn("system", "Be brief."), turn("user", "hello")]
    assert client.seen == [first, [*first, turn("assistant", "one two"), turn("user", "more")]]
    assert capsys.readouterr().out == "one two\none two\n"


@pytest.mark.trio
async def test_new_forgets_the_turns_and_keeps_the_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    client = await talk(monkeypatch, "hello\n/new\nmore\n", system="Be brief.")
    assert client.seen[1] == [turn("system", "Be brief."), turn("user", "more")]


@pytest.mark.trio
async def test_ctrl_c_cancels_the_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await talk(monkeypatch, "never end\nhello\n")
    assert client.seen[1] == [turn("user", "never end"), turn("assistant", "one"), turn("user", "hello")]
    assert capsys.readouterr().out == "one [cancelled]\none two\n"


@pytest.mark.trio
async def test_a_refused_turn_is_told_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await talk(monkeypatch, "too long\nhello\n")
    assert client.seen[1] == [turn("user", "hello")]
    captured = capsys.readouterr()
    assert captured.err == "error: there is no room; /new starts a new conversation\n"
    assert captured.out == "one two\n"


@pytest.mark.trio
async def test_an_answer_that_is_cut_short_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await talk(monkeypatch, "much\nhello\n")
    assert capsys.readouterr().out == "one two [cut short: --max-tokens allows more]\none two\n"
    assert client.seen[1][1] == turn("assistant", "one two")  # which is no part of the conversation


@pytest.mark.trio
async def test_where_the_context_is_nearly_full_an_answer_has_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await talk(monkeypatch, "nearly full\n")
    assert capsys.readouterr().out == "one two [cut short: the context is full; /new starts a new conversation]\n"
    client = await talk(monkeypatch, "nearly full\n", max_tokens=2000)
    assert client.limits == [2000]
    assert "the context is full" in capsys.readouterr().out
    client = await talk(monkeypatch, "wrong\n")
    assert client.limits == [1024]
    assert "temperature: is wrong" in capsys.readouterr().err


@pytest.mark.trio
async def test_commands_are_not_sent_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await talk(monkeypatch, "/help\n/nothing\n/etc/hosts is what?\n/quit\nhello\n")
    assert client.seen == [[turn("user", "/etc/hosts is what?")]]
    said = capsys.readouterr().out
    assert "There is no command /nothing." in said and said.count("/new") == 2


@pytest.mark.trio
async def test_a_terminal_never_gets_the_control_characters_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def hostile(self: ScriptedClient, endless: bool) -> AsyncIterator[Token]:
        yield Token(text="a\tb\n\x1b", token_id=1, index=0)
        yield Token(text="]0;title\x07\x9b31m\rc\u202e", token_id=2, index=1)

    monkeypatch.setattr(ScriptedClient, "_tokens", hostile)
    for is_terminal, said in ((True, "a\tb\n]0;title31mc"), (False, "a\tb\n\x1b]0;title\x07\x9b31m\rc\u202e")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        client = await talk(monkeypatch, "hello\nmore\n/quit\n")
        assert said in capsys.readouterr().out
        # What was said stays what was said.
        assert client.seen[1][1].content == "a\tb\n\x1b]0;title\x07\x9b31m\rc\u202e"


Directory = Callable[[str], Path]
OPTIONS: dict[str, Any] = {"n_ctx": 512, "batch_timeout": 0.0, "n_parallel": 1}
TURNS = [
    Message(role="user", content="Who shares a pool of blocks with every sequence?"),
    Message(role="assistant", content="one two"),
]


def run_chat(model: Path, session: Path, entered: str) -> str:
    """A run of the command as a process; what it said on standard error."""
    program = "from genbatch.clients.cli.main import main; main()"
    command = [sys.executable, "-c", program, "chat", "-m", str(model), "--session", str(session)]
    done = subprocess.run(
        [*command, "--max-tokens", "6", "--n-ctx", "512"],
        input=entered,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def head(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
    return found


@pytest.mark.trio
async def test_the_command_goes_on_where_the_last_run_left_off(
    tiny_model_dir: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = tiny_model_dir("llama"), SessionFile(tmp_path / "notes.chat")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The capital of France\nand of Spain\n"))
    async with open_batcher(str(model), **OPTIONS) as client:
        store = ConversationStore(file, file.read(), client)
        await Conversation(client, None, {"max_tokens": 6}, store).run()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert files(tmp_path) == ["notes.chat"]
    first = head(file.path)
    assert [turn["content"] for turn in first["turns"][::2]] == ["The capital of France", "and of Spain"]
    said = await trio.to_thread.run_sync(run_chat, model, file.path, "and of Italy\n")
    told = re.search(r"continuing after 4 turns, of which (\d+) tokens are already evaluated", said)
    assert told is not None and int(told[1]) >= 32, said
    again = head(file.path)
    assert again["turns"][:4] == first["turns"] and len(again["turns"]) == 6
    assert again["state_bytes"] > first["state_bytes"]


@pytest.mark.parametrize(("flags", "finds_running"), [((), True), (("--session", "notes.chat"), False)])
def test_a_session_takes_no_service_that_others_use(
    flags: tuple[str, ...], finds_running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no KV for anybody."""
    asked: list[bool] = []

    def open_client(*_: object, finds_running: bool) -> None:
        asked.append(finds_running)
        raise Unavailable("that is all")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("genbatch.clients.cli.chat.open_client", open_client)
    assert "that is all" in CliRunner().invoke(app, ["chat", *flags]).output
    assert asked == [finds_running]


@pytest.mark.trio
async def test_the_first_answer_after_a_restart_takes_its_prompt_from_the_session(
    tiny_model_dir: Directory, tmp_path: Path
) -> None:
    path = str(tiny_model_dir("llama"))
    turns = [Message(role="user", content="The capital of France is shared by every sequence of blocks")]
    async with open_batcher(path, **OPTIONS) as client:
        first = await client.generate(messages=turns, max_tokens=8)
        assert first.usage.cached_tokens == 0
        turns += [Message(role="assistant", content=first.text), Message(role="user", content="and of Spain")]
        fresh = await client.generate(messages=turns, max_tokens=8)
        state = await client.save_session(turns[:2])
        assert state
    async with open_batcher(path, **OPTIONS) as client:
        length = await client.load_session(state)
        assert length >= 32
        resumed = await client.generate(messages=turns, max_tokens=8)
        assert resumed.usage.cached_tokens >= length
        assert resumed.token_ids == fresh.token_ids
        # What follows a session is cached as ever, so that the second answer and the next save start from it.
        turns += [Message(role="assistant", content=resumed.text), Message(role="user", content="and of Italy and all")]
        third = await client.generate(messages=turns, max_tokens=8)
        assert third.usage.cached_tokens > resumed.usage.cached_tokens
        longer = await client.save_session(turns)
        assert len(longer) > len(state)
    async with open_batcher(path, **OPTIONS) as client:
        assert await client.load_session(longer) > length
        assert (await client.generate(messages=turns, max_tokens=8)).token_ids == third.token_ids


@pytest.mark.trio
async def test_saving_and_loading_beside_a_generation_change_nothing_of_it(tiny_model_dir: Directory) -> None:
    async with open_batcher(str(tiny_model_dir("llama")), n_ctx=512, batch_timeout=0.0, n_parallel=2) as client:
        alone = await client.generate("The capital", max_tokens=60, ignore_eos=True)
        await client.generate(messages=TURNS[:1], max_tokens=8)
        beside = []

        async def ask() -> None:
            beside.append(await client.generate("The capital", max_tokens=60, ignore_eos=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            for _ in range(6):  # more often than there are sequences to hold them
                state = await client.save_session(TURNS[:1])
                await client.load_session(state)
        assert beside[0].token_ids == alone.token_ids


@pytest.mark.trio
async def test_the_kv_of_another_model_or_a_damaged_one_is_refused(tiny_model_dir: Directory) -> None:
    async with open_batcher(str(tiny_model_dir("llama")), **OPTIONS) as client:
        await client.generate(messages=TURNS[:1], max_tokens=8)
        state = await client.save_session(TURNS[:1])
        for bad in (b"", state[:-5], b"x" * len(state), state[: len(state) // 2]):
            with pytest.raises(InvalidRequest, match="state"):
                await client.load_session(bad)
        assert (await client.stats())["held_prompts"] == 0
        assert await client.load_session(state) > 0
    async with open_batcher(str(tiny_model_dir("qwen3")), **OPTIONS) as client:
        with pytest.raises(InvalidRequest, match="another model"):
            await client.load_session(state)


class Answering:
    """A client that takes or refuses the KV it is given."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.loaded: list[bytes] = []

    async def save_session(self, messages: Sequence[MessageLike], *, tenant: str = "") -> bytes:
        if self.refuses:
            raise Unavailable("no")
        return repr(messages).encode()

    async def load_session(self, state: bytes, *, tenant: str = "") -> int:
        self.loaded.append(state)
        if self.refuses:
            raise InvalidRequest("state", "the saved sequence is of another model")
        return 17


@pytest.mark.trio
async def test_what_was_said_is_kept_whatever_becomes_of_the_kv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = SessionFile(tmp_path / "notes.chat")
    assert file.read() == Session()
    await ConversationStore(file, file.read(), Answering()).close("Be brief.", TURNS)
    saved = file.read()
    assert (saved.system, saved.turns) == ("Be brief.", TURNS) and saved.state and not saved.is_damaged

    refusing = Answering(refuses=True)
    store = ConversationStore(file, saved, refusing)
    await store.resume()
    assert refusing.loaded == [saved.state]
    assert "another model" in capsys.readouterr().err
    await store.close("Be brief.", TURNS)
    assert file.read() == Session(system="Be brief.", turns=TURNS)

    remote = ConversationStore(file, file.read(), object())
    await remote.resume()
    assert "without their KV" in capsys.readouterr().err
    await remote.close(None, TURNS[:1])
    assert file.read() == Session(turns=TURNS[:1])


@pytest.mark.trio
async def test_a_damaged_state_is_told_and_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = SessionFile(tmp_path / "notes.chat")
    file.write(Session(turns=TURNS, state=b"0123456789"))
    whole = file.path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"x", whole + b"x"):
        file.path.write_bytes(damaged)
        client = Answering()
        await ConversationStore(file, file.read(), client).resume()
        assert client.loaded == []
        said = capsys.readouterr().err
        assert "damaged" in said and "after 2 turns." in said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n",
        b"\xff\n",
        b"{}\n",
        b'{"format":"other","system":null,"turns":[],"state_bytes":0,"state_sha256":""}\n',
    ],
)
def test_a_file_that_is_no_session_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(content)
    with pytest.raises(SessionFileError, match=r"letter\.txt"):
        SessionFile(path).read()
    assert path.read_bytes() == content


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SessionFile(tmp_path / "notes.chat")
    file.write(Session(turns=TURNS))

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(SessionFileError, match="No space"):
        file.write(Session())
    assert file.read().turns == TURNS
    assert files(tmp_path) == ["notes.chat"]
    with pytest.raises(SessionFileError, match="cannot be written"):
        SessionFile(tmp_path / "absent" / "notes.chat").write(Session())


WRITES = """
import os, sys
from pathlib import Path
from genbatch.clients.cli.chat import Session, SessionFile
from genbatch.proto.messages import Message

file, number = SessionFile(Path(sys.argv[1])), 0
while True:
    number += 1
    file.write(Session(turns=[Message(role="user", content=str(number))], state=b"%d" % (number % 10) * 2_000_000))
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.trio
async def test_a_program_that_is_killed_while_it_writes_leaves_a_whole_session(tmp_path: Path) -> None:
    path, rng = tmp_path / "notes.chat", random.Random(1)
    for _ in range(12):
        command = [sys.executable, "-c", WRITES, str(path)]
        async with trio.open_nursery() as nursery:
            process = await nursery.start(partial(trio.run_process, command, stdout=subprocess.PIPE, check=False))
            for _ in range(rng.randint(1, 3)):  # then it is within the next write
                written = int((await process.stdout.receive_some()).split()[-1])
            process.kill()
        session = SessionFile(path).read()
        [turn] = session.turns
        assert not session.is_damaged and int(turn.content) >= written
        assert session.state == str(int(turn.content) % 10).encode() * 2_000_000
        assert len(files(tmp_path)) <= 2
    SessionFile(path).write(Session(turns=TURNS))
    assert files(tmp_path) == ["notes.chat"]  # what the killed ones had begun is gone


def test_what_another_program_is_writing_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.chat"
    writing, finished = tmp_path / ".notes.chat.12345678", tmp_path / ".notes.chat.abcdefgh"
    finished.write_bytes(b"half")
    with writing.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        SessionFile(path).write(Session(turns=TURNS))
        assert sorted(files(tmp_path)) == [writing.name, "notes.chat"]
