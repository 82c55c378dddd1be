"""What of a client's sequences is open, and what of it waits: that is what admission goes by."""

from types import SimpleNamespace
from typing import Any, cast

from genbatch.actors.batcher.open_requests import OpenRequests
from genbatch.actors.batcher.slots import FairShare
from genbatch.actors.scheduling.request import Phase


def test_open_and_waiting_sequences_are_counted_by_account_and_phase() -> None:
    requests = OpenRequests(cast(Any, None), FairShare(), cast(Any, None), lambda: None, lambda: 0.0)

    def add(account: str, *phases: Phase, n: int | None = None) -> None:
        request = SimpleNamespace(
            account=account,
            monitor=object(),
            width=len(phases) if n is None else n,
            payer=None,
            expires_at=None,
            sequences=[SimpleNamespace(phase=phase) for phase in phases],
        )
        requests.add(cast(Any, request))

    add("a", Phase.PENDING, Phase.PREFILLING, Phase.DECODING, Phase.FINISHED)
    add("a", Phase.PENDING)
    add("b", Phase.DECODING, Phase.FINISHED)
    add("c", n=3)  # with the tokenizer
    assert requests.open_of() == {"a": 4, "b": 1, "c": 3}
    assert requests.waiting_of() == {"a": 2, "b": 0, "c": 3}
