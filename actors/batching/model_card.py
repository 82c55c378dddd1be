"""What `GetModels` is answered with."""

from genbatch.nif.context import Context
from genbatch.proto.messages import ModelCard


def model_card(ctx: Context, n_parallel: int) -> ModelCard:
    """The model that a context serves to `n_parallel` sequences at once."""
    model, runner = ctx.model, ctx.runner
    return ModelCard(
        id=model.name,
        n_ctx=ctx.max_positions,
        n_parallel=n_parallel,
        vocab_size=model.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        quantize=runner.quantize,
        runner=runner.name,
        device=str(runner.device),
    )
