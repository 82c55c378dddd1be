"""Tokens are compared with hashes from a file that may change while the service runs."""

import os
from pathlib import Path

import pytest

from genbatch.actors.security import key_files
from genbatch.actors.security.curve_keys import KeyStore
from genbatch.actors.security.key_files import KeyFileError, TokenFile, bearer_token, hash_token, new_token


def test_a_token_gives_its_name_and_every_other_text_gives_none(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    alice, bob = store.new_token("alice"), store.new_token("bob")
    tokens = TokenFile(store.tokens)
    assert (tokens.tenant(alice), tokens.tenant(bob)) == ("alice", "bob")
    for other in ("", "alice", alice[:-1], alice + "a", alice.upper(), hash_token(alice), "é\udfff", "x" * 10**7):
        assert tokens.tenant(other) is None


def test_the_file_has_no_token_and_only_its_owner_can_open_it(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys")
    token = store.new_token("alice")
    assert token not in store.tokens.read_text()
    assert store.tokens.stat().st_mode & 0o777 == 0o600
    assert store.directory.stat().st_mode & 0o777 == 0o700


def test_all_hashes_are_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore(tmp_path)
    first = store.new_token("a")
    store.new_token("b")
    compared = []

    def compare_digest(given: str, known: str) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr(key_files.hmac, "compare_digest", compare_digest)
    assert TokenFile(store.tokens).tenant(first) == "a"
    assert len(compared) == 2


def test_a_change_of_the_file_counts_at_once(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    alice = store.new_token("alice")
    tokens = TokenFile(store.tokens)
    assert tokens.tenant(alice) == "alice"
    bob = store.new_token("bob")
    assert tokens.tenant(bob) == "bob"
    store.revoke("alice")
    assert (tokens.tenant(alice), tokens.tenant(bob)) == (None, "bob")


def test_a_mark_of_windows_is_skipped_and_a_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"\xef\xbb\xbfalice " + hash_token("a").encode() + b"\r\n")
    file.chmod(0o600)
    assert TokenFile(file).tenant("a") == "alice"
    file.write_bytes(file.read_bytes() + b"J\xe4ger 5\n")
    with pytest.raises(KeyFileError, match="line 2 is no name and SHA-256"):
        TokenFile(file)


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore(tmp_path)
    alice = store.new_token("alice")
    os.utime(store.tokens, (10**9, 10**9))
    tokens = TokenFile(store.tokens)
    monkeypatch.setattr(Path, "read_text", lambda path: pytest.fail("read again"))
    assert tokens.tenant(alice) == "alice"


@pytest.mark.parametrize("fault", ["alice", "alice 00", f"al/ice {'0' * 64}", f"a {'0' * 64}\na {'1' * 64}", "\xff"])
def test_a_faulty_file_lets_nobody_else_in_and_is_told(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(tmp_path)
    alice = store.new_token("alice")
    tokens = TokenFile(store.tokens)
    store.tokens.write_text(fault, encoding="latin-1")
    assert (tokens.tenant(alice), tokens.tenant("")) == (None, None)
    assert caplog.text.count("left out") == 1
    with pytest.raises(KeyFileError):
        TokenFile(store.tokens)
    store.tokens.write_text(f"alice {hash_token(alice)}\n\n# a comment\n")
    assert tokens.tenant(alice) == "alice"


def test_a_faulty_line_locks_nobody_else_out(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    alice = store.new_token("alice")
    tokens = TokenFile(store.tokens)
    with store.tokens.open("a") as file:
        file.write("bob 00\n")
    assert tokens.tenant(alice) == "alice"
    store.tokens.unlink()
    assert tokens.tenant(alice) is None


def test_a_missing_file_and_one_that_others_may_write_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="No such file"):
        TokenFile(tmp_path / "tokens")
    store = KeyStore(tmp_path)
    store.new_token("alice")
    store.tokens.chmod(0o660)
    with pytest.raises(KeyFileError, match="chmod go-w"):
        TokenFile(store.tokens)


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) >= 43 and token.isascii() for token in tokens)


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("", None),
        (None, None),
    ],
)
def test_a_bearer_header_has_a_token(header: str | None, token: str | None) -> None:
    assert bearer_token(header) == token


def test_a_token_may_be_as_long_as_is_said(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("".join(f"of_{size} {hash_token('x' * size)}\n" for size in (512, 513)))
    path.chmod(0o600)
    tokens = TokenFile(path)
    assert tokens.tenant("x" * 512) == "of_512" and tokens.tenant("x" * 513) is None
