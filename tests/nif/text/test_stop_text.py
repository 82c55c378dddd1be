"""Stop strings, whatever the pieces in which the text arrives."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from genbatch.nif.text.detokenizer import StopMatcher

ALPHABET = "ab😀"


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    found = [at for word in stop if (at := text.find(word)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def run(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stop)
    shown = "".join(matcher.push(piece)[0] for piece in pieces)
    return shown + matcher.flush(), matcher.stopped


@settings(deadline=None)
@given(
    st.lists(st.text(ALPHABET, max_size=6), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4),
)
@example(["abab", "c"], ["ababa", "b"])
@example(["a", "a", "a", "b"], ["aab"])
def test_streamed_text_equals_whole_text_for_every_split(pieces: list[str], stop: list[str]) -> None:
    assert run(pieces, stop) == cut("".join(pieces), stop)


@settings(deadline=None)
@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_nothing_is_held_that_cannot_become_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    text = shown = ""
    for piece in pieces:
        text += piece
        emitted, stopped = matcher.push(piece)
        shown += emitted
        if stopped or cut(text, stop)[1]:
            break
        longest = max(n for word in stop for n in range(len(word)) if text.endswith(word[:n]))
        assert shown == text[: len(text) - longest]


def test_a_stop_string_ends_the_text_in_the_piece_that_completes_it() -> None:
    matcher = StopMatcher(["END", "###"])
    assert matcher.push("one E") == ("one ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("D two") == ("", True)
    assert matcher.push("three") == ("", True)
    assert matcher.flush() == ""
    assert matcher.stopped


def test_a_false_alarm_is_shown_as_soon_as_it_is_one() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ("", False)
    assert matcher.push("TER") == ("ENTER", False)
    assert matcher.push(" E") == (" ", False)
    assert matcher.flush() == "E"
    assert not matcher.stopped


def test_a_match_waits_while_an_earlier_longer_one_is_possible() -> None:
    matcher = StopMatcher(["abcdef", "cd"])
    assert matcher.push("xabcd") == ("x", False)
    assert matcher.push("e") == ("", False)
    assert matcher.push("!") == ("ab", True)


def test_a_match_in_question_at_the_end_counts() -> None:
    matcher = StopMatcher(["abcdef", "cd"])
    matcher.push("abcd")
    assert matcher.flush() == "ab"
    assert matcher.stopped


@settings(deadline=None)
@given(
    st.lists(st.text(ALPHABET, max_size=6), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
)
@example(["abab"], ["ab", "aba"])
@example(["abcdef"], ["abcdef", "cd"])
def test_the_string_that_ended_the_text_is_told_and_can_be_kept_however_it_is_cut(
    pieces: list[str], stop: list[str]
) -> None:
    whole = "".join(pieces)
    before, stopped = cut(whole, stop)
    # Of those that begin there, the one that is complete first.
    found = min((word for word in stop if whole.startswith(word, len(before))), key=len) if stopped else None
    for parts in (pieces, [whole], list(whole)):
        plain, keeping = StopMatcher(stop), StopMatcher(stop, keep=True)
        kept = "".join([keeping.push(part)[0] for part in parts]) + keeping.flush()
        for part in parts:
            plain.push(part)
        plain.flush()
        assert plain.stop_string == keeping.stop_string == found
        assert kept == before + (found or "")


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.flush() == ""


def test_hard_texts_take_time_in_proportion_to_their_length() -> None:
    word = "a" * 2000 + "b"
    text = "a" * 100_000  # 2 * 10**8 steps for a matcher that starts over at each character
    assert run([text[i : i + 7] for i in range(0, len(text), 7)], [word]) == (text, False)
