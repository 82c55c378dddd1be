"""The conversation: what the model is given, and what Ctrl-C and the end of the input do."""

import io
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from genbatch.clients.cli.chat import Conversation
from genbatch.proto.errors import PromptTooLong
from genbatch.proto.messages import Message, Token


class ScriptedClient:
    """Answers "one two" to everything; interrupts itself after "one" when told "never end"."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []

    @asynccontextmanager
    async def stream(self, *, messages: list[Message], **parameters: Any) -> AsyncIterator[AsyncIterator[Token]]:
        self.seen.append(messages)
        if messages[-1].content == "too long":
            raise PromptTooLong("there is no room")
        yield self._tokens(endless=messages[-1].content == "never end")

    async def _tokens(self, endless: bool) -> AsyncIterator[Token]:
        yield Token(text="one", token_id=1, index=0)
        if endless:
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        yield Token(text=" two", token_id=2, index=1)


async def talk(monkeypatch: pytest.MonkeyPatch, entered: str, system: str | None = None) -> ScriptedClient:
    monkeypatch.setattr(sys, "stdin", io.StringIO(entered))
    client = ScriptedClient()
    await Conversation(client, system, {}).run()  # type: ignore[arg-type]
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
    assert captured.err == "error: there is no room\n"
    assert captured.out == "one two\n"


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
