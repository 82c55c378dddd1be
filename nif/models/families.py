"""Lists the native model families: `python -m genbatch.nif.models.families` prints the list of docs/guide.md."""

import textwrap

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from genbatch.nif.models.architectures import ARCHITECTURES
from genbatch.nif.models.gguf_families import known_kinds
from genbatch.nif.models.gguf_file import BLOCKS
from genbatch.nif.models.weight_source import FLOAT_KINDS


def families_markdown() -> str:
    """Return a table of transformers' classes with their GGUF architectures, and a line with the types of blocks."""
    names: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    files: dict[str, list[str]] = {}
    for architecture, kind in known_kinds():
        files.setdefault(names[kind], []).append(architecture)
    files["MistralForCausalLM"] = ["llama"]
    rows = [
        f"| `{kind.removesuffix('ForCausalLM')}` | {', '.join(f'`{name}`' for name in files.get(kind, []))} |"
        for kind in sorted(ARCHITECTURES, key=str.lower)
    ]
    types = ", ".join((*FLOAT_KINDS, *BLOCKS))
    head = ("| safetensors: transformers' class, less `ForCausalLM` | GGUF: `general.architecture` |", "|---|---|")
    return "\n".join(
        (*head, *rows, "", *textwrap.wrap(f"Types of a GGUF file's tensors, in any mix: {types}.", 118), "")
    )


if __name__ == "__main__":
    print(families_markdown(), end="")
