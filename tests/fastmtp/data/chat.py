"""Chat templates written for these tests, that do what those of the Qwen families do, and a tokenizer for them.

`PLAIN` is of Qwen3-Next-Instruct's kind: ChatML, a block of tools, calls as JSON. `DROPS` is of the first Qwen3's:
thinking of earlier turns is dropped, the generation prompt says nothing about it. `OPENS` is of Qwen3.5's: the
generation prompt opens a thinking block, or supplies an empty one, and calls are functions with parameters.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastmtp.data.rendering import Rendered, Renderer

_TOOLS = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You can call:
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""

_LAST_QUERY = """
{%- set found = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}
{%- if found.last < 0 %}{{ raise_exception('Nobody asks anything.') }}{% endif %}"""

_OTHERS = """{% elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}"""

_JSON_CALLS = """
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}"""

_FUNCTION_CALLS = """
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\n' }}{% endif %}<tool_call>
<function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}{{ '\n' }}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}{{ '\n' }}</function>
</tool_call>
{%- endfor %}"""

# What was thought comes apart from the content, or in it.
_THINKING = """
{%- set parts = message.content.split('</think>') %}
{%- set content = parts[-1].lstrip('\n') %}
{%- set inline = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}
{%- set thought = message.reasoning_content or inline %}
"""

PLAIN = (
    _TOOLS
    + "{%- for message in messages %}{%- if message.role == 'assistant' %}<|im_start|>assistant\n{{ message.content }}"
    + _JSON_CALLS
    + "<|im_end|>\n"
    + _OTHERS
    + "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS = (
    _TOOLS
    + _LAST_QUERY
    + "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    + _THINKING
    + "<|im_start|>assistant\n{% if loop.index0 > found.last and (loop.last or thought) %}"
    + "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    + _JSON_CALLS
    + "<|im_end|>\n"
    + _OTHERS
    + "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n"
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENS = (
    _TOOLS
    + _LAST_QUERY
    + "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    + _THINKING
    + "<|im_start|>assistant\n{% if loop.index0 > found.last %}"
    + "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    + _FUNCTION_CALLS
    + "<|im_end|>\n"
    + _OTHERS
    + "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n"
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    + "{% else %}<think>\n{% endif %}{% endif %}"
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A token for each byte, and one for two line feeds, as real vocabularies have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "ĊĊ"])}  # line feeds as bytes are written
    core = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    # Line feeds stay together, as in the vocabularies of Qwen.
    lines = pre_tokenizers.Split(Regex(r"\n+|[^\n]+"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    core.add_tokens([AddedToken(text, special=False) for text in ADDED])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def renderer(template: str, **arguments: bool) -> Renderer:
    return Renderer(tokenizer(template), arguments)


def marked(made: Renderer, row: Rendered) -> str:
    """The row's text with [[ ]] around what is supervised."""
    text, place = "", 0
    for begin, end in row.spans:
        before, own = (str(made.tokenizer.decode(row.ids[slice(*part)])) for part in ((place, begin), (begin, end)))
        text, place = f"{text}{before}[[{own}]]", end
    return text + str(made.tokenizer.decode(row.ids[place:]))
