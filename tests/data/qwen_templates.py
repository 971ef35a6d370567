r"""Chat templates with the structure of Qwen2.5's and Qwen3's, in words of our own.

Both write tools into the system's turn, calls as JSON between ``<tool_call>`` and its end, and
results into a turn of the user's. Qwen3's writes the thoughts behind the last question, none
before, and one of nothing where the last answer has none. Content may have images.
"""

_BEGIN = r"""
{%- macro shown(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content or [] -%}
      {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro result(message, first, last) -%}
  {{- '<|im_start|>user' if first -}}
  {{- '\n<tool_response>\n' + shown(message.content) + '\n</tool_response>' -}}
  {{- '<|im_end|>\n' if last -}}
{%- endmacro -%}
{%- set says = messages[0].role == 'system' -%}
{%- set system = shown(messages[0].content) if says else DEFAULT -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' + (system + '\n\n' if system else '') + 'Tools:\n<tools>' -}}
  {%- for tool in tools -%}
    {{- '\n' -}}{{- tool | tojson -}}
  {%- endfor -%}
  {{- '\n</tools>\nCall them so:\n<tool_call>\n{"name": ...}\n</tool_call><|im_end|>\n' -}}
{%- elif system -%}
  {{- '<|im_start|>system\n' + system + '<|im_end|>\n' -}}
{%- endif -%}
"""
_END = r"""
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\nOPENED' -}}
{%- endif -%}
"""
# Arguments go through JSON whatever they are: text would be quoted once more.
QWEN2_5 = (
    _BEGIN.replace("DEFAULT", "'You help.'")
    + r"""
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- result(message, loop.first or messages[loop.index0 - 1].role != 'tool',
               loop.last or messages[loop.index0 + 1].role != 'tool') -}}
  {%- elif message.role == 'assistant' and message.tool_calls -%}
    {{- '<|im_start|>assistant' -}}
    {%- if message.content -%}
      {{- '\n' + shown(message.content) -}}
    {%- endif -%}
    {%- for call in message.tool_calls -%}
      {%- set call = call.function if call.function is defined else call -%}
      {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
      {{- call.arguments | tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif not (loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\n' + shown(message.content) + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
"""
    + _END.replace("OPENED", "")
)
_QWEN3 = (
    _BEGIN.replace("DEFAULT", "''")
    + r"""
{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) -%}
{%- for message in messages[::-1] -%}
  {%- set text = shown(message.content) -%}
  {%- if ns.searching and message.role == 'user' and not text.startswith('<tool_response>') -%}
    {%- set ns.searching = false -%}
    {%- set ns.last_query_index = messages|length - 1 - loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set content = shown(message.content) -%}
  {%- if message.role == 'tool' -%}
    {{- result(message, loop.first or messages[loop.index0 - 1].role != 'tool',
               loop.last or messages[loop.index0 + 1].role != 'tool') -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = '' -%}
    {%- if message.reasoning_content is string -%}
      {%- set thought = message.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last_query_index and (KEPT or thought) -%}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
    {%- else -%}
      {{- content -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '\n' if content or not loop.first -}}
      {%- set call = call.function if call.function is defined else call -%}
      {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
      {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif not (loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
"""
    + _END
)


def qwen3(*, opens: bool = False, keeps: bool = False) -> str:
    """``opens``: the prompt begins a thought.

    Of the answers behind the last question that have no thought, the last one has one of nothing
    (Qwen3) or, where the template ``keeps`` them, each has (Qwen3.5).
    """
    text = _QWEN3.replace("OPENED", "<think>\\n" if opens else "")
    return text.replace("KEPT", "true" if keeps else "loop.last")


QWEN3 = qwen3()
