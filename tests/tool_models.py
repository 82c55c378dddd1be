"""A tiny model whose chat template knows tools, in a context that has room for them."""

import json
import shutil
from pathlib import Path

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tool_model(source: Path, target: Path, template: str = TEMPLATE) -> Path:
    """A copy of the model in `source` with this template and 4096 positions."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (target / "chat_template.jinja").write_text(template)
    return target
