"""Scoring: makes the scores of a text, or of a query and a document, from the states or logits of a model.

    scoring = classifier_scoring("bge", directory, config)      # *ForSequenceClassification
    scoring = token_scoring("reranker", directory, tokenizer)   # LogitScore of sentence-transformers, or pooling "rank"
    scores = scoring.finish(pooled, activates=True)

A classifier's head gives a score for each label. A causal model that answers yes or no has one score: the difference of
two tokens' logits after the prompt. The files of sentence-transformers name the tokens and the activation. Without
these files, the activation is the default of its CrossEncoder and of transformers' pipelines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from genbatch.nif.errors import ModelError
from genbatch.nif.json_files import read_json, read_object

if TYPE_CHECKING:
    from genbatch.nif.models.weight_source import WeightSource
    from genbatch.nif.text.tokenizer import Tokenizer

SIGMOID, SOFTMAX, IDENTITY = "sigmoid", "softmax", "identity"
_ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": SIGMOID,
    "torch.nn.Sigmoid": SIGMOID,
    "torch.nn.modules.activation.Softmax": SOFTMAX,
    "torch.nn.Softmax": SOFTMAX,
    "torch.nn.modules.linear.Identity": IDENTITY,
    "torch.nn.Identity": IDENTITY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The rule that makes scores from a pooled state or from logits.

    Args:
        labels: the names of the scores.
        activation: SIGMOID, SOFTMAX or IDENTITY.
        weight, bias: of the head, [labels, hidden] and [labels]; None if the model's runner applies the head.
        tokens: the tokens to compare by their logits: yes, and no if the model has a token for it; None for a head.
        instruction: the text in front of every pair, from the model's files; "" for none.
    """

    labels: tuple[str, ...]
    activation: str
    weight: npt.NDArray[np.float32] | None = None
    bias: npt.NDArray[np.float32] | None = None
    tokens: tuple[int, ...] | None = None
    instruction: str = ""

    def finish(self, pooled: npt.NDArray[np.float32], *, activates: bool) -> npt.NDArray[np.float32]:
        """Return the scores, [labels].

        Args:
            pooled: the state [hidden], the scores of a runner that applies the head [labels], or the logits [vocab].
            activates: whether the activation is applied.
        """
        scores = pooled
        if self.tokens is not None:
            yes, *no = (scores[token] for token in self.tokens)
            scores = np.array([yes - no[0] if no else yes], np.float32)
        elif self.weight is not None:
            scores = self.weight @ scores
            scores = scores if self.bias is None else scores + self.bias
        if not activates or self.activation == IDENTITY:
            return scores
        probabilities: npt.NDArray[np.float32]
        if self.activation == SIGMOID:
            with np.errstate(over="ignore"):  # exp overflows for a score far below 0; the result is 0, as it must be
                probabilities = np.float32(1) / (np.float32(1) + np.exp(-scores))
            return probabilities
        weights = np.exp(scores - scores.max())
        probabilities = weights / weights.sum()
        return probabilities


def is_classifier(config: Any) -> bool:
    """Return whether the weights are those of a model with a head that scores whole texts."""
    written = getattr(config, "architectures", None) or [""]
    return bool(written[0].endswith("ForSequenceClassification"))


def classifier_scoring(model: str, directory: Path, config: Any) -> Scoring:
    """Return the scoring of a `*ForSequenceClassification`; its runner applies the head.

    Raises:
        ModelError: the model's files name an activation that is not served, or a prompt.
    """
    labels = tuple(str(config.id2label.get(number, number)) for number in range(config.num_labels))
    settings = read_object(model, directory / "config_sentence_transformers.json", optional=True)
    if _default_prompt(settings):
        raise ModelError(model, "it needs a prompt in front of every pair, which only chat templates support")
    if (activation := _named_activation(model, settings, config)) is None:
        multiple = getattr(config, "problem_type", None) == "multi_label_classification"
        activation = SIGMOID if len(labels) == 1 or multiple else SOFTMAX
    return Scoring(labels=labels, activation=activation)


def head_of(model: str, weights: "WeightSource") -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """Return the weight and the bias of a decoder's head.

    Raises:
        ModelError: the files have none.
    """
    names = weights.names()
    if "score.weight" not in names:
        raise ModelError(model, "its weights lack score.weight, the head that scores")
    bias = weights.tensor("score.bias").whole().float().numpy() if "score.bias" in names else None
    return weights.tensor("score.weight").whole().float().numpy(), bias


GGUF_RANK = 4
"""The pooling_type of GGUF files that score."""
_HEAD = "cls.output"


def gguf_scoring(file: Any) -> Scoring | None:
    """Return the scoring by the head in a decoder's GGUF file; None if the file has no head and tokens give the scores.

    A head with the labels yes and no gives the probability of yes, as in llama.cpp.

    Args:
        file: the GgufFile.

    Raises:
        ModelError: the head has other labels.
    """
    if f"{_HEAD}.weight" not in file.names():
        return None
    weight = file.tensor(f"{_HEAD}.weight").whole().numpy()
    bias = file.tensor(f"{_HEAD}.bias").whole().numpy() if f"{_HEAD}.bias" in file.names() else None
    labels = file.metadata.get(f"{file.architecture}.classifier.output_labels")
    if len(weight) == 2 and labels == ["yes", "no"]:
        weight, bias = weight[:1] - weight[1:], None if bias is None else bias[:1] - bias[1:]
    if len(weight) != 1:
        raise file.fault(f"its head {_HEAD}.weight gives {labels or len(weight)}; served are one number, or yes and no")
    return Scoring(labels=("relevance",), activation=SIGMOID, weight=weight, bias=bias)


def scores_by_tokens(model: str, directory: Path) -> bool:
    """Return whether sentence-transformers' files compare two tokens' logits."""
    return _logit_score(model, directory) is not None


def token_scoring(model: str, directory: Path | None, config: Any, tokenizer: "Tokenizer") -> Scoring:
    """Return a causal model's scoring by the tokens that its files name, or by the tokens "yes" and "no".

    Args:
        directory: the folder of sentence-transformers' files; None if there are none.

    Raises:
        ModelError: the model's vocabulary lacks a token, or the files name an activation that is not served.
    """
    named = None if directory is None else _logit_score(model, directory)
    if named is None:
        ids = [tokenizer.backend.token_to_id(word) for word in ("yes", "no")]
    else:
        ids = [named[key] for key in ("true_token_id", "false_token_id") if named.get(key) is not None]
    tokens = tuple(token for token in ids if isinstance(token, int) and 0 <= token < config.vocab_size)
    if not tokens or len(tokens) != len(ids):
        raise ModelError(model, f"its scores compare the logits of the tokens {ids}, which its vocabulary lacks")
    settings = (
        {} if directory is None else read_object(model, directory / "config_sentence_transformers.json", optional=True)
    )
    activation = _named_activation(model, settings, config) or SIGMOID
    return Scoring(labels=("relevance",), activation=activation, tokens=tokens, instruction=_default_prompt(settings))


def _logit_score(model: str, directory: Path) -> dict[str, Any] | None:
    """Return the settings of the module LogitScore; None if modules.json has no such module."""
    path = directory / "modules.json"
    modules = read_json(model, path) if path.is_file() else None
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type")).endswith(".LogitScore"):
            return module_settings(model, directory, module)
    return None


def module_settings(model: str, directory: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a module in sentence-transformers' modules.json; {} if its file is missing.

    Raises:
        ModelError: the module's folder is outside the model's folder, or the file cannot be read.
    """
    folder = str(module.get("path", ""))
    place = (directory / folder / "config.json").resolve()
    if not place.is_relative_to(directory.resolve()):
        raise ModelError(model, f"modules.json names the folder {folder!r}, which is outside the model's folder")
    return read_object(model, place, optional=True)


def _named_activation(model: str, settings: Mapping[str, Any], config: Any) -> str | None:
    """Return the activation that the model's files name; None if they do not name an activation."""
    inside = getattr(config, "sentence_transformers", None)
    named = settings.get("activation_fn")
    named = named or (inside.get("activation_fn") if isinstance(inside, dict) else None)
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is None:
        return None
    if named not in _ACTIVATIONS:
        raise ModelError(model, f"its activation is {str(named)[:80]}; served are Sigmoid, Softmax and Identity")
    return _ACTIVATIONS[named]


def _default_prompt(settings: Mapping[str, Any]) -> str:
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    return str(prompts.get(name) or "") if isinstance(prompts, dict) and name is not None else ""
