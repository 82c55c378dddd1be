"""Keys in files that only their owner can open, and a list that may change while the service runs."""

import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth

from genbatch.actors.security.curve_keys import ClientKeys, KeyStore, ServerKeys, Tenant, read_public_key
from genbatch.actors.security.key_files import KeyFileError


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    store = KeyStore(tmp_path / "keys")
    store.new_server()
    return store


def test_nobody_else_can_open_what_was_made(store: KeyStore) -> None:
    store.new_client("alice")
    store.new_token("alice")
    made = list(store.directory.rglob("*"))
    assert len(made) == 7  # server's two, the list with one, clients with one, tokens
    assert all(stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600) for path in made)
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


def test_a_clients_file_is_all_it_needs(store: KeyStore) -> None:
    keys = ClientKeys.load(str(store.new_client("alice")))
    server = ServerKeys(store.directory)
    assert keys.server == server.pair.public
    assert server.client_name(keys.pair.public.decode()) == "alice"
    assert zmq.auth.load_certificate(store.server_key)[0] == keys.server
    assert keys.pair.secret.decode() not in repr(keys)


def test_a_client_may_have_made_its_keys_itself(store: KeyStore, tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "mine")
    Path(secret).chmod(0o600)
    store.authorise("bob", public)
    with pytest.raises(KeyFileError, match="--server-key"):
        ClientKeys.load(secret)
    for server_key in (str(store.server_key), read_public_key(str(store.server_key))):
        keys = ClientKeys.load(secret, server_key)
        assert ServerKeys(store.directory).client_name(keys.pair.public.decode()) == "bob"
    with pytest.raises(KeyFileError, match="as 'bob'"):
        store.authorise("another", read_public_key(public))


def test_the_list_may_change_at_any_time(store: KeyStore) -> None:
    server = ServerKeys(store.directory)
    alice = ClientKeys.load(str(store.new_client("alice"))).pair.public.decode()
    assert server.client_name(alice) == "alice"
    store.revoke("alice")
    assert server.client_name(alice) is None


def test_nothing_is_overwritten(store: KeyStore) -> None:
    path = store.new_client("alice")
    before = path.read_text()
    with pytest.raises(KeyFileError, match="exists already"):
        store.new_client("alice")
    with pytest.raises(KeyFileError, match="exists already"):
        store.authorise("alice", zmq.curve_keypair()[0].decode())
    with pytest.raises(KeyFileError, match="exists already"):
        store.new_server()
    store.new_token("bob")
    with pytest.raises(KeyFileError, match="revoke it first"):
        store.new_token("bob")
    assert path.read_text() == before


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "a\n", "é", "x" * 65, "-rf"])
def test_a_name_is_no_path(store: KeyStore, name: str) -> None:
    for act in (store.new_client, store.new_token, store.revoke, lambda name: store.authorise(name, "x")):
        with pytest.raises(KeyFileError, match="is no name"):
            act(name)


def test_who_is_let_in_is_listed(store: KeyStore) -> None:
    alice = ClientKeys.load(str(store.new_client("alice"))).pair.public.decode()
    store.new_token("alice")
    store.new_token("bob")
    assert store.tenants() == [Tenant("alice", alice, True), Tenant("bob", None, True)]
    with pytest.raises(KeyFileError, match="no key or token"):
        store.revoke("carl")
    store.revoke("alice")
    assert store.tenants() == [Tenant("bob", None, True)]
    with pytest.raises(KeyFileError, match="genbatch keys new"):
        KeyStore(store.directory / "none").tenants()


def test_a_secret_that_others_can_read_is_not_used(store: KeyStore) -> None:
    path = store.new_client("alice")
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        ClientKeys.load(str(path))
    (store.directory / "server.key_secret").chmod(0o604)
    with pytest.raises(KeyFileError, match="chmod 600"):
        ServerKeys(store.directory)


def test_files_that_are_no_keys_are_named(store: KeyStore, tmp_path: Path) -> None:
    secret = store.new_client("alice")
    other = KeyStore(tmp_path / "other")
    other.new_server()
    text = secret.read_text()
    mixed = text.replace(zmq.auth.load_certificate(secret)[0].decode(), read_public_key(str(other.server_key)))
    for content, reason in [
        ("", "has no public key"),
        ('public-key = "short"', "the public key is not valid"),
        (store.server_key.read_text(), "has no secret key"),
        (mixed, "does not belong"),
    ]:
        secret.write_text(content)
        with pytest.raises(KeyFileError, match=reason) as info:
            ClientKeys.load(str(secret))
        assert str(secret) in str(info.value)
    for source in (str(tmp_path / "none"), "~" * 40, str(tmp_path)):
        with pytest.raises(KeyFileError, match="neither a file nor a key"):
            read_public_key(source)
    with pytest.raises(KeyFileError, match="No such file"):
        ServerKeys(tmp_path / "none")


def test_a_faulty_entry_of_the_list_locks_nobody_else_out(store: KeyStore, caplog: pytest.LogCaptureFixture) -> None:
    alice = ClientKeys.load(str(store.new_client("alice"))).pair.public.decode()
    server = ServerKeys(store.directory)
    authorised = store.directory / "authorised"
    (authorised / "carl.key").write_text("nothing")
    assert server.client_name(alice) == "alice"
    assert caplog.text.count("left out") == 1
    with pytest.raises(KeyFileError, match=r"carl\.key: has no public key"):
        ServerKeys(store.directory)
    (authorised / "carl.key").write_text((authorised / "alice.key").read_text())
    assert server.client_name(alice) == "alice"
    with pytest.raises(KeyFileError, match="has the key of 'alice' again"):
        ServerKeys(store.directory)
    authorised.rename(store.directory / "away")
    assert server.client_name(alice) is None
