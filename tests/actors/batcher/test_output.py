"""Output: text that never shows a part of a stop string, and why it ended."""

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from genbatch.actors.batcher.generation import Output, OutputRules, Reading
from genbatch.nif.sampling.sampler import Sampled
from genbatch.nif.text.tools import HERMES, AnswerReader

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def bytewise() -> Tokenizer:
    """One token a byte."""
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def run(tokenizer: Tokenizer, text: str, *, stop: Sequence[str] = (), max_tokens: int = 99, echo: str = "") -> Output:
    ids = tokenizer.encode(text).ids
    output = Output(tokenizer, [], OutputRules(stop=stop, stop_ids=frozenset(), max_tokens=max_tokens, echo=echo))
    for token_id in ids:
        output.push(Sampled(token_id))
        if output.finish_reason:
            break
    return output


@pytest.mark.parametrize(
    ("text", "stop", "shown", "reason"),
    [
        ("hello world", ["o w"], "hell", "stop"),
        ("hello world", ["xyz"], "hello world", "length"),
        ("abcd", ["bcde", "bc"], "a", "stop"),  # of two that begin together, the one that is complete first
        ("zabc", ["abcd", "bc"], "za", "stop"),  # the one that began first stays possible until the end
        ("häuser", ["us"], "hä", "stop"),
        ("ab", ["b"], "a", "stop"),  # completed by the very last token
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    bytewise: Tokenizer, text: str, stop: list[str], shown: str, reason: str
) -> None:
    output = run(bytewise, text, stop=stop, max_tokens=len(text.encode()))
    assert "".join(output.text_parts) == shown
    assert output.finish_reason == reason


def test_an_end_in_mid_character_shows_what_decode_shows(bytewise: Tokenizer) -> None:
    output = run(bytewise, "aé", max_tokens=2)
    assert "".join(output.text_parts) == bytewise.decode(output.token_ids) == "a\ufffd"


def test_echo_comes_first_and_once(bytewise: Tokenizer) -> None:
    output = run(bytewise, "bc", max_tokens=2, echo="a")
    assert output.text_parts == ["ab", "c"]
    assert output.choice("length").text == "abc"


def test_a_stop_id_ends_it_and_shows_nothing(bytewise: Tokenizer) -> None:
    [a, b] = bytewise.encode("ab").ids
    output = Output(bytewise, [], OutputRules(stop=[], stop_ids={b}, max_tokens=9))
    assert output.push(Sampled(a)) == "a"
    assert output.push(Sampled(b)) == ""
    assert output.finish_reason == "stop"
    assert output.token_ids == [a, b]


@pytest.mark.parametrize(
    ("min_tokens", "shown", "reason"),
    [(0, "a", "stop"), (3, "a", "stop"), (4, "abcab", "stop"), (6, "abcab", "stop"), (7, "abcabc", "length")],
)
def test_a_stop_string_that_is_complete_before_min_tokens_is_text(
    bytewise: Tokenizer, min_tokens: int, shown: str, reason: str
) -> None:
    """A first one, of tokens 2 and 3, and a second one, of the last two; none of both where more is the least."""
    stop = ["bc"] if min_tokens <= 3 else ["c"]
    ids = bytewise.encode("abcabc").ids
    output = Output(bytewise, [], OutputRules(stop=stop, stop_ids=frozenset(), max_tokens=6, min_tokens=min_tokens))
    for token_id in ids:
        output.push(Sampled(token_id))
        if output.finish_reason:
            break
    assert ("".join(output.text_parts), output.finish_reason) == (shown, reason)
    assert len(output.token_ids) >= min(min_tokens, 6)


def test_what_is_held_back_is_text_once_the_output_is_cut_short(bytewise: Tokenizer) -> None:
    """Half of a stop string, or of a character: neither will come to its end."""
    output = run(bytewise, "aST", stop=["STOP"])
    assert output.text_parts == ["a", "", ""]
    assert (output.choice("deadline").text, output.choice("deadline").finish_reason) == ("aST", "deadline")
    halved = Output(bytewise, [], OutputRules(stop=[], stop_ids=frozenset(), max_tokens=9))
    for token_id in bytewise.encode("aé").ids[:2]:
        halved.push(Sampled(token_id))
    assert halved.choice("deadline").text == "a\ufffd"
    undecided = run(bytewise, "abc", stop=["bcde", "bc"])  # the shorter one is complete, the longer one will not be
    assert (undecided.choice("deadline").text, undecided.choice("deadline").finish_reason) == ("a", "stop")


def test_an_output_cut_before_its_first_token_is_its_echo(bytewise: Tokenizer) -> None:
    assert run(bytewise, "", echo="asked").choice("deadline").text == "asked"


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("several", [True, False])
def test_an_answer_with_one_call_at_most_ends_where_a_second_one_begins(bytewise: Tokenizer, several: bool) -> None:
    written = f"See. {CALL}\n{CALL} on"
    reading = Reading(lambda: AnswerReader(HERMES), frozenset(), several)
    output = Output(bytewise, [], OutputRules(stop=(), stop_ids=frozenset(), max_tokens=len(written), reading=reading))
    for token_id in bytewise.encode(written).ids:
        output.push(Sampled(token_id))
        if output.finish_reason:
            break
    choice = output.choice("cancelled")
    assert choice.text == ("See.on" if several else "See.")  # white space beside calls is nobody's
    assert [call.arguments for call in choice.tool_calls] == ['{"a": 1}'] * (2 if several else 1)
    assert choice.finish_reason == ("length" if several else "tool_calls")


def test_a_blank_output_ends_by_the_same_rules(bytewise: Tokenizer) -> None:
    rules = OutputRules(stop=["b"], stop_ids=frozenset(), max_tokens=6, min_tokens=3, echo="<", wants_logprobs=False)
    pair = bytewise.encode("ab").ids
    ends = []
    for output in (Output(bytewise, [], rules), Output(bytewise, [], rules).blank()):
        while output.finish_reason is None:
            output.push(Sampled(pair[len(output.token_ids) % 2]))
        ends.append((output.choice(output.finish_reason).text, output.finish_reason))
    assert ends == [("<aba", "stop")] * 2
