"""Pooling: turns the hidden states of a text's tokens into one embedding, by the rule in the model's files.

    pooling = directory_pooling("all-minilm", directory, config)      # None: the files name no pooling
    vector = pooling.finish(states.mean(0))

sentence-transformers writes modules.json, which names the pooling, the modules after it, and the files of their
settings. GGUF has the key `<architecture>.pooling_type`. The rule is never guessed, because the vectors of the last
token, the mean and the first token look alike, but have different meanings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import read_json, read_object
from genbatch.nif.scoring import Scoring, module_settings

LAST, MEAN, CLS, RANK = "last", "mean", "cls", "rank"
KINDS = (LAST, MEAN, CLS)
"""A text's embedding is the last token's state, the mean of all states, or the first token's state. RANK, which makes
scores, takes the last token's logits."""

_OF_SENTENCE_TRANSFORMERS = {"lasttoken": LAST, "mean": MEAN, "cls": CLS}
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_OF_GGUF = {1: MEAN, 2: CLS, 3: LAST}
# Modules without an effect after training.
_SILENT_MODULES = ("Transformer", "Dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The rule that makes embeddings.

    Args:
        kind: one of KINDS.
        normalize: whether embeddings have the length 1.
        size: elements of an embedding.
        shorter: sizes to which an embedding may be cut, if the model was trained for that (Matryoshka).
        prefix: the text that the model expects before every text; "" for none.
        lowercase: whether texts are converted to lower case first.
        max_tokens: most tokens of a text; None means that only the model's positions limit a text.
        reads_whole: whether the model reads a text in both directions, so that its runner pools the whole text.
        scoring: the rule that makes scores of the pooled vector; None for an embedding.
    """

    kind: str
    normalize: bool
    size: int
    shorter: frozenset[int] = frozenset()
    prefix: str = ""
    lowercase: bool = False
    max_tokens: int | None = None
    reads_whole: bool = False
    scoring: Scoring | None = None

    @property
    def embeds(self) -> bool:
        """Whether the pooled vector is an embedding, not a score."""
        return self.scoring is None

    @property
    def needs_states(self) -> bool:
        """Whether the runner must return hidden states."""
        return self.kind != RANK

    @property
    def needs_every_state(self) -> bool:
        """Whether the runner must return the states of all tokens, not only of the last."""
        return self.kind in (MEAN, CLS) and not self.reads_whole

    def text(self, text: str) -> str:
        """Return the text that the model reads: with the prefix, and in lower case if the model expects it."""
        return self.prefix + (text.lower() if self.lowercase else text)

    def finish(
        self, pooled: npt.NDArray[np.float32], dimensions: int | None = None, *, activates: bool = True
    ) -> npt.NDArray[np.float32]:
        """Return the embedding, [dimensions or size], or the scores.

        Args:
            pooled: [size], pooled from the states by the rule `kind`; [vocab_size] for RANK.
            activates: whether to apply the model's activation to scores.
        """
        if self.scoring is not None:
            return self.scoring.finish(pooled, activates=activates)
        vector = pooled[:dimensions]
        if not self.normalize:
            return vector
        # A vector of zeros stays zeros, as in torch's `normalize`.
        return vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12))


def directory_pooling(model: str, directory: Path, config: Any) -> Pooling | None:
    """Return the pooling that the files of sentence-transformers name; None without such files or without a pooling.

    Args:
        model: the user's name of the model, for errors.
        config: transformers' configuration of the model.

    Raises:
        ModelError: the files cannot be read, or name a rule that is not supported.
    """
    settings, normalize = _pooling_settings(model, directory)
    if settings is None:
        return None
    modes = _modes(settings)
    if len(modes) != 1 or modes[0] not in _OF_SENTENCE_TRANSFORMERS:
        known = ", ".join(_OF_SENTENCE_TRANSFORMERS)
        raise ModelError(model, f"its embeddings are pooled by {' and '.join(modes)}; served are {known}")
    prefix = _default_prompt(model, directory)
    if prefix and settings.get("include_prompt") is False:
        raise ModelError(model, "its pooling leaves out the tokens of its prompt (include_prompt), which is not served")
    limits = read_object(model, directory / "sentence_bert_config.json", optional=True)
    longest = limits.get("max_seq_length")
    return replace(
        plain_pooling(_OF_SENTENCE_TRANSFORMERS[modes[0]], config),
        normalize=normalize,
        prefix=prefix,
        lowercase=limits.get("do_lower_case") is True,
        max_tokens=longest if isinstance(longest, int) and longest > 0 else None,
    )


def gguf_pooling(model: str, metadata: Mapping[str, Any], config: Any) -> Pooling | None:
    """Return the pooling that a GGUF file names; None if the file names none.

    Raises:
        ModelError: the file names a rule that is not supported.
    """
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if kind == 0:
        return None
    if kind not in _OF_GGUF:
        raise ModelError(model, f"its pooling_type is {kind}; served are 1 (mean), 2 (cls) and 3 (last)")
    return plain_pooling(_OF_GGUF[kind], config)


def plain_pooling(kind: str, config: Any) -> Pooling:
    """Return a pooling of this kind over the model's hidden states, with embeddings of length 1."""
    size = int(config.hidden_size)
    shorter = getattr(config, "matryoshka_dimensions", None)
    if shorter is None:
        shorter = range(1, size) if getattr(config, "is_matryoshka", None) is True else ()
    return Pooling(kind=kind, normalize=True, size=size, shorter=frozenset(n for n in shorter if 0 < n < size))


def scoring_pooling(scoring: Scoring, config: Any) -> Pooling:
    """Return the pooling of a model that scores by the state of a text's last token."""
    return replace(plain_pooling(LAST, config), size=len(scoring.labels), scoring=scoring)


def _pooling_settings(model: str, directory: Path) -> tuple[dict[str, Any] | None, bool]:
    """Return the pooling's configuration, and whether its vectors are normalised."""
    path = directory / "modules.json"
    if not path.is_file():
        settings = read_object(model, directory / "1_Pooling" / "config.json", optional=True)
        return settings or None, False
    modules = read_json(model, path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(model, "modules.json is not a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds:
        return None, False
    for kind in kinds:
        if kind not in (*_SILENT_MODULES, "Pooling", "Normalize"):
            raise ModelError(model, f"its embeddings go through a module {kind}, which is not served")
    module = modules[kinds.index("Pooling")]
    settings = module_settings(model, directory, module)
    if not settings:
        raise ModelError(model, f"modules.json names a pooling, but {module.get('path', '')}/config.json is missing")
    return settings, "Normalize" in kinds


def _modes(settings: Mapping[str, Any]) -> list[str]:
    if "pooling_mode" in settings:
        named = settings["pooling_mode"]
        return [str(mode) for mode in named] if isinstance(named, list) else [str(named)]
    # The mean is the default, as in sentence-transformers.
    return [mode for key, mode in _OLD_KEYS.items() if settings.get(key) is True] or ["mean"]


def _default_prompt(model: str, directory: Path) -> str:
    """Return the text that sentence-transformers puts before a text if its caller names no prompt."""
    settings = read_object(model, directory / "config_sentence_transformers.json", optional=True)
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    if name is None or not isinstance(prompts, dict):
        return ""
    if not isinstance(prompts.get(name), str):
        raise ModelError(model, f"config_sentence_transformers.json has no prompt {str(name)[:80]!r}")
    return str(prompts[name])
