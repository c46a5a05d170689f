"""Chat templates that several tests give a tokenizer."""

from __future__ import annotations

THOUGHTS = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
"""Opens each reply with a thought, in the prompt, too."""
ROLES = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Renders roles and contents only: no tool, no call."""
