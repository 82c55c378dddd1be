"""A model that plays a part: it asks for a tool that an agent's program offers, and once it has the result says so.

Its weights are a Markov chain. Attention and the MLP add nothing, so the last hidden state is the embedding of the
last token, and the head's row of a token is the embedding of the token before it in the script. The chat template
ends a prompt with the token at which the part begins. The context is long, for agents send 20,000 tokens.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

POSITIONS = 65536
VOCAB_SIZE = 4096
HIDDEN_SIZE = 128
# The file that a tool call makes: an agent has run the call when it is there.
PROOF = "was-here"
COMMAND = f"touch {PROOF}"
ANSWER = "The work is done."
# By the name of an agent's tool that runs commands, the call's arguments.
CALLS = {
    "Bash": {"command": COMMAND, "description": "Makes a file"},  # Claude Code
    "exec_command": {"cmd": COMMAND},  # Codex
    "bash": {"command": COMMAND, "description": "Makes a file"},  # opencode
    "run": {"command": COMMAND},  # llm
}
# What an agent's program without tools reads as an edit of a file: aider's form "whole".
EDIT = f"{PROOF}\n```\n{ANSWER}\n```\n"
END = "<|end|>"
_ROOT = Path(__file__).resolve().parents[1]

TEMPLATE = (
    "{% set part = namespace(begin='<|tell|>') %}"
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n"
    "{% if tool.function.name in [" + ", ".join(f"'{name}'" for name in CALLS) + "] %}"
    "{% set part.begin = '<|ask ' + tool.function.name + '|>' %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if '*file listing*' in (message['content'] or '') %}{% set part.begin = '<|edit|>' %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message['role'] == 'tool' %}{% set part.begin = '<|tell|>' %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{{ part.begin }}{% endif %}"
)


def _script() -> dict[str, str]:
    """What follows what."""
    steps = {"<|tell|>": ANSWER, ANSWER: END, "<|edit|>": EDIT, EDIT: END}
    for name, arguments in CALLS.items():
        call = "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
        steps |= {f"<|ask {name}|>": call, call: END}
    return steps


def agent_model(directory: Path) -> Path:
    """Saves the model, and returns its directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    steps = _script()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2 * len(steps),
        special_tokens=["<|begin|>", "<|start|>", END, *(token for token in steps if token.startswith("<|"))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted((_ROOT / "docs").glob("*.md"))], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in steps if not token.startswith("<|")])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token=END, pad_token=END, chat_template=TEMPLATE
    )
    wrapped.save_pretrained(directory)
    torch.manual_seed(0)
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=HIDDEN_SIZE, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.token_to_id("<|begin|>"), eos_token_id=end, pad_token_id=end,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embeddings = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, HIDDEN_SIZE))
        model.model.embed_tokens.weight.copy_(embeddings)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in steps.items():
            model.lm_head.weight[tokenizer.token_to_id(after)] += embeddings[tokenizer.token_to_id(before)]
    model.save_pretrained(directory)
    return directory
