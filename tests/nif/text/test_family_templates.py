"""Chat templates of families with recurrent layers: tools are shown, and the calls that each family writes are read.

Each template is what the published one does with tools, calls, answers of tools and thinking, and no more.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from genbatch.nif.text.tokenizer import Tokenizer, with_numbered_calls
from genbatch.nif.text.tools import AnswerReader
from tests.nif.text.test_tools import take_apart
from tests.nif.tiny_models import build_tokenizer

_CHATML = "{{- '<|im_start|>' + message.role + '\n' + content }}"
_XML_CALLS = (
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\n' + (value | string)"
    " + '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}"
)
_TURNS = "{%- for message in messages %}{%- set content = message.content %}" + _CHATML
_JSON_CALLS = (
    '{%- for call in message.tool_calls or [] %}{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}"
)
_SHOWN = "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
_END = "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"

TEMPLATES = {
    # The call's form is shown to the model, and the prompt opens the thinking.
    "qwen3_5": _SHOWN + "{{- '<tool_call>\n<function=example>\n' }}{%- endif %}" + _TURNS + _XML_CALLS + _END
    + "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
    "{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}",
    "nemotron_3": "{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}"
    "{%- if not tools is defined %}{%- set tools = [] %}{%- endif %}" + _SHOWN + "{%- endif %}" + _TURNS + _XML_CALLS
    + _END + "{{- '<think>\n' if enable_thinking else '<think></think>' }}{%- endif %}",
    # Nemotron Nano 2: one list of calls.
    "nemotron_h": "{%- if tools %}{{- '<SPECIAL_10>System\n<AVAILABLE_TOOLS>[' }}{%- for tool in tools %}"
    "{{- tool.function | tojson }}{%- endfor %}{{- ']</AVAILABLE_TOOLS>\n<TOOLCALL>[{\"name\": ...}]</TOOLCALL>\n' }}"
    "{%- endif %}{%- for message in messages %}{{- '<SPECIAL_11>' + message.role + '\n' + message.content }}"
    "{%- if message.tool_calls %}{{- '<TOOLCALL>[' }}{%- for call in message.tool_calls %}{{- '{\"name\": \"' +"
    " call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}' }}{%- endfor %}"
    "{{- ']</TOOLCALL>' }}{%- endif %}{{- '\n<SPECIAL_12>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<SPECIAL_11>Assistant\n<think>\n\n' }}{# </think> #}{%- endif %}",
    "granite_4": "{%- if available_tools is defined and available_tools %}{%- set tools = available_tools %}"
    "{%- endif %}{%- if tools %}{{- '<|start_of_role|>system<|end_of_role|>' }}{%- for tool in tools %}"
    "{{- tool | tojson }}{%- endfor %}{{- '<tool_call>\n{\"name\": <function-name>}\n</tool_call>' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content }}"
    + _JSON_CALLS + "{{- '<|end_of_text|>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}",
    "falcon_h1": _SHOWN + "{{- \"<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>\" }}"
    "{%- endif %}" + _TURNS + _JSON_CALLS + _END + "{%- endif %}",
    # The marks of its tools, and no call.
    "lfm2": "{%- if tools %}{{- '<|im_start|>system\nList of tools: <|tool_list_start|>[' }}{%- for tool in tools %}"
    "{{- tool | tojson }}{%- endfor %}{{- ']<|tool_list_end|><|im_end|>\n' }}{%- endif %}" + _TURNS + _END
    + "{%- endif %}",
    # No mark at all. What the model thought is cut off, and it opens its thinking itself.
    "lfm2_5": "{%- if tools %}{{- '<|im_start|>system\nList of tools: [' }}{%- for tool in tools %}"
    "{{- tool | tojson }}{%- endfor %}{{- ']<|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
    "{%- set content = message.content %}{%- if '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1] | trim %}{%- endif %}" + _CHATML + _END + "{%- endif %}",
    "lfm2_5_moe": "{%- macro render(calls) %}{%- for call in calls %}{{- '<|tool_call_start|>[' + call.function.name "
    "+ '(' }}{%- for name, value in call.function.arguments.items() %}{{- name + '=' }}{%- if value is string %}"
    "{{- \"'\" + value + \"'\" }}{%- elif value is mapping %}{{- value | tojson }}{%- else %}{{- value | string }}"
    "{%- endif %}{{- ', ' if not loop.last }}{%- endfor %}{{- ')]<|tool_call_end|>' }}{%- endfor %}{%- endmacro %}"
    "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) }}{%- endif %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.thinking is defined %}{{- '<think>' + message.thinking + '</think>' }}{%- endif %}"
    "{%- generation %}{{- message.content }}{%- if message.tool_calls is defined %}{{- render(message.tool_calls) }}"
    "{%- endif %}{%- endgeneration %}" + _END + "{%- endif %}",
    # Kimi-Linear, as Kimi K2: a call's id has its name and its number in the conversation.
    "kimi_linear": "{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}"
    "{%- endif %}{%- for message in messages %}{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}"
    "{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\n' }}{%- endif %}"
    "{{- message.content }}{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}"
    "{%- for call in message.tool_calls %}{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
    "{{- call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}{%- endfor %}"
    "{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}",
    "olmo_hybrid": "{%- if tools %}{{- '<|im_start|>system\n<functions>' + (tools | tojson) + '</functions>' }}"
    "{%- endif %}" + _TURNS + "{%- if message.tool_calls %}{{- '<function_calls>' + message.tool_calls[0].function.name"
    " + '()</function_calls>' }}{%- endif %}" + _END + "{%- endif %}",
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
            },
        },
    }
]
ARGUMENTS = {"city": "Den Haag", "days": 3, "wind": True}
ONE, TWO = ("weather", ARGUMENTS), ("weather", {"city": "12"})
_XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nDen Haag\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=wind>\n{}\n</parameter>\n</function>\n</tool_call>"
)
_JSON = '{"name": "weather", "arguments": {"city": "Den Haag", "days": 3, "wind": true}}'
# What each family writes: text, thinking, calls.
ANSWERS: list[tuple[str, str, str, str, list[Any]]] = [
    ("qwen3_5", "Sun or rain?\n</think>\n\nLet me see.\n\n" + _XML.format("true"), "Let me see.", "Sun or rain?",
     [ONE]),
    ("qwen3_5", "</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n</function>\n"
     "</tool_call>\n" + _XML.format("true"), "", "", [TWO, ONE]),
    ("nemotron_3", "hm</think>" + _XML.format("True"), "", "hm", [ONE]),  # templates show Python's True
    ("nemotron_h", "hm\n</think>\n\n<TOOLCALL>[" + _JSON + ', {"name": "weather", "arguments": {"city": "12"}}]'
     "</TOOLCALL>\n", "", "hm", [ONE, TWO]),
    ("nemotron_h", "</think>\nNo <TOOL is needed.", "No <TOOL is needed.", "", []),
    ("granite_4", f"<tool_call>\n{_JSON}\n</tool_call>", "", "", [ONE]),
    ("falcon_h1", "<tool_call>\n{'arguments': {'city': 'Den Haag', 'days': 3, 'wind': True}, 'name': 'weather'}\n"
     "</tool_call>", "", "", [ONE]),
    ("falcon_h1", '<tool_call>\n{"arguments": {"city": "12"}, "name": "weather"}\n</tool_call>', "", "", [TWO]),
    ("lfm2", '<|tool_call_start|>[weather(city="Den Haag", days=3, wind=True), weather(city="12")]<|tool_call_end|>'
     "Checking.", "Checking.", "", [ONE, TWO]),
    ("lfm2", f"<|tool_call_start|>[{_JSON}]<|tool_call_end|>", "", "", [ONE]),
    ("lfm2_5", "<think>hm</think>\n<|tool_call_start|>[weather(city='Den Haag', days=3, wind=true)]<|tool_call_end|>",
     "", "hm", [ONE]),
    ("lfm2_5_moe", "<think>hm</think>It is <|tool_call_start|>[weather(city='12')]<|tool_call_end|>", "It is", "hm",
     [TWO]),
    ("kimi_linear", "Now.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     '{"city": "Den Haag", "days": 3, "wind": true}<|tool_call_end|><|tool_call_begin|>functions.weather:1'
     '<|tool_call_argument_begin|>{"city": "12"}<|tool_call_end|><|tool_calls_section_end|>', "Now.", "", [ONE, TWO]),
    ("olmo_hybrid", '<function_calls>weather(city="Den Haag", days=3, wind=True)\nweather(city="12")'
     "</function_calls>", "", "", [ONE, TWO]),
]  # fmt: skip


def made(family: str, directory: Path) -> Tokenizer:
    """A tokenizer with the family's template; LFM2's have marks as special tokens."""
    build_tokenizer(directory, chat_template=TEMPLATES[family])
    hf = AutoTokenizer.from_pretrained(directory)
    if family.startswith("lfm2"):
        hf.add_special_tokens({"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>"]})
    return Tokenizer(hf)


@pytest.mark.parametrize(("family", "written", "text", "reasoning", "calls"), ANSWERS)
def test_what_a_family_writes_is_read_however_it_is_cut(
    tmp_path: Path, family: str, written: str, text: str, reasoning: str, calls: list[Any]
) -> None:
    tokenizer = made(family, tmp_path)
    assert tokenizer.knows_tools
    opened = tokenizer.decode(
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], TOOLS), skip_special_tokens=False
    )
    starts = opened.rstrip().endswith("<think>")
    assert starts == family.startswith(("qwen", "nemotron"))
    assert tokenizer.thinks or not reasoning
    for length in (1, 3, 10_000):
        reader = AnswerReader(tokenizer.tool_format, TOOLS, thinking=tokenizer.thinking_tags, starts_thinking=starts)
        pieces = [written[place : place + length] for place in range(0, len(written), length)]
        found = take_apart(reader, pieces)
        assert (found[0], found[1]) == (text, reasoning)
        assert [(name, json.loads(arguments)) for name, arguments in found[2]] == calls


@pytest.mark.parametrize("family", TEMPLATES)
def test_earlier_calls_and_tools_stand_in_the_prompt(tmp_path: Path, family: str) -> None:
    tokenizer = made(family, tmp_path)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    tokens = tokenizer.apply_chat_template(messages, TOOLS)
    prompt = tokenizer.decode(tokens, skip_special_tokens=False)
    assert '"days"' in prompt and "sunny" in prompt
    assert family != "kimi_linear" or "## Return of functions.weather:0\nsunny" in prompt
    before = prompt.partition("sunny")[0]
    written = before[before.index("assistant") :]
    reader = AnswerReader(tokenizer.tool_format, TOOLS)
    [(name, arguments)] = take_apart(reader, [written.partition("assistant")[2]])[2]
    assert name == "weather"
    assert family == "olmo_hybrid" or json.loads(arguments) == ARGUMENTS


def test_numbers_of_calls_go_on_through_a_conversation() -> None:
    def called(*ids: str) -> dict[str, object]:
        return {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": f"f_{i}"}} for i in ids]}

    answers = [{"role": "tool", "tool_call_id": i, "content": ""} for i in ("b", "a", "unknown")]
    named = with_numbered_calls([called("a", "b"), *answers, called("a")])
    assert [call["id"] for call in named[0]["tool_calls"]] == ["functions.f_a:0", "functions.f_b:1"]
    assert [answer["tool_call_id"] for answer in named[1:4]] == ["functions.f_b:1", "functions.f_a:0", "unknown"]
    assert [call["id"] for call in named[4]["tool_calls"]] == ["functions.f_a:2"]
