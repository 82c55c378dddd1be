"""What a configuration says of a model."""

from types import SimpleNamespace
from typing import Any

import pytest

from genbatch.nif.errors import ModelError
from genbatch.nif.models.architectures import max_position
from genbatch.nif.models.encoders import encoder_positions


def test_a_model_of_states_alone_needs_no_length() -> None:
    config: Any = SimpleNamespace(num_hidden_layers=2, layer_types=["linear_attention"] * 2, conv_kernel=4)
    assert max_position("m", config) == 1 << 20
    with pytest.raises(ModelError, match="max_position_embeddings"):
        max_position("m", SimpleNamespace(layer_types=["linear_attention", "full_attention"]))


@pytest.mark.parametrize("limit", [None, 0, -1, "many", 2.5])
def test_a_configuration_without_a_length_is_refused(limit: Any) -> None:
    with pytest.raises(ModelError, match="max_position_embeddings"):
        max_position("m", SimpleNamespace(max_position_embeddings=limit))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "tokenizers", "longest"),
    [(512, None, 512), (512, 128, 128), (512, 10**30, 512), (None, 64, 64), (1, 0, 1)],
)
def test_an_encoder_reads_as_much_as_model_and_tokenizer_say(
    limit: int | None, tokenizers: int | None, longest: int
) -> None:
    hf: Any = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=limit), base_model=None)
    assert encoder_positions("m", hf, tokenizers) == longest


@pytest.mark.parametrize("bound", [None, 0, 10**30])
def test_an_encoder_of_which_nobody_says_how_much_it_reads_is_refused(bound: int | None) -> None:
    hf: Any = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=bound), base_model=None)
    with pytest.raises(ModelError, match="most positions of a text"):
        encoder_positions("m", hf, bound)


def test_a_model_ends_where_its_keys_would_be_rescaled() -> None:
    def longest(rope: Any) -> int:
        return max_position("m", SimpleNamespace(max_position_embeddings=64, rope_parameters=rope))  # type: ignore[arg-type]

    assert longest(None) == longest({"rope_type": "linear", "original_max_position_embeddings": 16}) == 64
    assert longest({"rope_type": "longrope", "original_max_position_embeddings": 16}) == 16
    assert longest({"full": {"rope_type": "dynamic", "original_max_position_embeddings": 32}, "base": 1.0}) == 32
