"""The option `draft`: a smaller model is loaded beside the model, within its memory, and refused with the reason."""

from pathlib import Path

import pytest
import trio

from genbatch import open_batcher
from genbatch.actors.batcher.drafting import DraftCosts
from genbatch.nif.context.draft_model import NUM_SLOTS, DraftModel
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError
from tests.nif.native.models import build_native_model
from tests.nif.tiny_models import build_tokenizer

LLAMA = {"dtype": "float32", "n_ctx": 512}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_native_model("llama", tmp_path_factory.mktemp("draft"), build_tokenizer)


def test_answers_with_a_draft_model_equal_answers_without(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCosts, "price", lambda self, num_sequences, num_keys, guess_s: 0.1)  # on any machine

    async def answers(draft: str) -> tuple[list[int], int]:
        async with open_batcher(str(llama), draft=draft, n_parallel=2, batch_timeout=0, **LLAMA) as batcher:
            answer = await batcher.generate(
                token_ids=list(range(5, 15)), max_tokens=120, ignore_eos=True, temperature=0
            )
            stats = await batcher.stats()
            return answer.token_ids, stats["accepted_draft_tokens"]

    plain, without = trio.run(answers, "")
    drafted, accepted = trio.run(answers, str(llama))
    assert drafted == plain
    assert without == 0 < accepted


FREE = 60_000_000


def test_the_draft_model_counts_as_used_memory(llama: Path) -> None:
    pools = []
    for draft in ("", str(llama)):
        options = EngineOptions(
            model_path=str(llama), draft=draft, dtype="float32", n_ctx=0, max_tokens_in_cache=100_000
        )
        engine = load_engine(options)
        engine._free_memory = lambda collect=True: FREE  # type: ignore[method-assign]
        if engine.draft is not None:
            engine.draft._free_memory = lambda collect=True: FREE // 2  # type: ignore[method-assign]
        context = engine.open_context(n_parallel=2, n_held=0, n_batch=32)
        pools.append(context.n_ctx)
        if context.drafter is not None:
            assert isinstance(context.drafter, DraftModel)
            assert context.drafter._ctx.num_sequences == NUM_SLOTS
        context.close()
    assert pools[1] < pools[0]


@pytest.mark.parametrize(
    ("draft", "options", "reason"),
    [
        ("smollm2", {}, "has another vocabulary"),
        ("/no/such/model.gguf", {}, "no/such/model"),
        ("self", {"runner": "torch"}, "the runner torch.* cannot verify drafts exactly"),
        ("self", {"tensor_parallel": 2}, "has no draft model"),
    ],
)
def test_a_draft_model_that_cannot_draft_is_refused(
    llama: Path, draft: str, options: dict[str, str | int], reason: str
) -> None:
    draft = str(llama) if draft == "self" else draft
    with pytest.raises(OptionError, match=reason) as caught:
        load_engine(EngineOptions(model_path=str(llama), draft=draft, **LLAMA, **options)).open_context(  # type: ignore[arg-type]
            n_parallel=2, n_held=0, n_batch=32
        )
    assert caught.value.option == "draft"
