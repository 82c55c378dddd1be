"""A tiny model whose chat template knows tools, in a context that has room for them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tool_model(source: Path, target: Path, template: str = TEMPLATE, positions: int = 4096) -> Path:
    """A copy of the model in `source` with this template and so many positions."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    (target / "chat_template.jinja").write_text(template)
    return target


FILL_IN_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def add_marks(model: Path, marks: Sequence[str] = FILL_IN_MARKS) -> None:
    """Give the model in this directory special tokens, in the place of its last merges.

    Args:
        marks: their texts; without them the marks of models that fill in a gap.
    """
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for mark in marks:
        first, second = merges.pop()
        token_id = vocabulary.pop(first + second)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": mark, "special": True, **flags})
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(tokenizer))
