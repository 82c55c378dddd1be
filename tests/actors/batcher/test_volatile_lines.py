"""A line that a client changes with each request: who takes it out, and what is counted where nobody does."""

from collections.abc import Callable

import pytest
import torch

from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.messages import BILLING_HEADER
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.nif.context.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.messages import GenerateRequest, Message

SYSTEM = "You are an agent. " * 4


def tokens_of(model: Model, first: Message, *, strips: bool = True) -> tuple[list[int], list[int]]:
    """A conversation's tokens, and those that it shares with others."""
    intake = Intake(model, BatcherOptions(strip_billing_header=strips), 512)
    wanted = GenerateRequest(messages=[first, Message(role="user", content="hello")])
    prompt = intake.start_prompt(wanted)
    assert prompt is not None
    assert prompt.rendering.wait(60)
    read = intake.read(wanted, prompt)
    return read.tokens, read.first_message


def header(value: str) -> str:
    return f"{BILLING_HEADER} cc_version=2.1.37; cch={value};\n"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_billing_header_is_no_part_of_a_system_prompt_or_of_what_it_shares(
    tiny_model: Callable[[str], Model], role: str
) -> None:
    model = tiny_model("llama")
    plain = tokens_of(model, Message(role=role, content=SYSTEM))
    assert tokens_of(model, Message(role=role, content=header("fa690") + SYSTEM)) == plain
    assert tokens_of(model, Message(role=role, content=header("0b1c2") + SYSTEM)) == plain


def test_the_header_stays_where_it_is_another_text_or_the_operator_wants_it(tiny_model: Callable[[str], Model]) -> None:
    model, said = tiny_model("llama"), header("fa690") + SYSTEM
    plain = tokens_of(model, Message(role="system", content=SYSTEM))[0]
    kept = tokens_of(model, Message(role="system", content=said), strips=False)[0]
    assert len(kept) > len(plain)
    assert model.tokenizer.hf.decode(kept).count(BILLING_HEADER) == 1
    for message in (
        Message(role="user", content=said),
        Message(role="system", content=f"x{said}"),
        Message(role="system", content=f"\n{said}"),
    ):
        assert BILLING_HEADER in model.tokenizer.hf.decode(tokens_of(model, message)[0])


def test_a_line_that_changes_is_counted_as_the_cause(tiny_model: Callable[[str], Model]) -> None:
    model = tiny_model("llama")
    context = Context(model, TorchRunner(model), n_ctx=256, n_parallel=1, block_size=4, n_batch=64)
    cache = context.kv.prefix_cache
    assert cache is not None
    rest = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for line in ([9, 8, 7, 6], [9, 8, 5, 4]):
        done = context.attach_prefix(0, line + rest)
        assert done == 0
        context.prefill((line + rest)[done:], 0, done)
        context.seq_rm(0)
    # The last block holds the prompt's last token, which is never a hit.
    assert cache.num_recomputed == {"evicted": 0, "no_snapshot": 0, "window": 0, "volatile_line": 36}
    context.close()
