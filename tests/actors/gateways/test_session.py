"""The outbox of one client: what shares a message, and what does not."""

from typing import Any

import pytest

from genbatch.actors.gateways import session
from genbatch.actors.gateways.session import Outbox


def token(index: int) -> Any:
    return [1, index, 100, "a"]


def test_tokens_share_a_message_up_to_a_bound_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_TOKENS_A_MESSAGE", 2)
    box = Outbox()
    box.post(b"a final that is longer than the bound")
    for index in range(5):
        box.post_token(token(index), coalesce=True)
    box.post_token(token(5), coalesce=False)
    box.post(b"another final")
    assert box.num_waiting == 8
    first, *tokens, alone, last = box._entries
    assert (first, last) == (b"a final that is longer than the bound", b"another final")
    assert tokens == [[token(0), token(1)], [token(2), token(3)], [token(4)]] and alone == [token(5)]
