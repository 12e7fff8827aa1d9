"""Dialogues by tokens: one mechanism for tasks (`tasks/text.py`) and agents
(`agents/chat_format.py`).

`text_tokenizer` is a model's tokenizer. `chat_template` renders chats and continues them, within
the bounds of `template_bounds`; `template_messages` has the forms in which templates take calls.
`tool_formats` names the formats in which models call tools and finds that of a template,
`tool_markup` reads those of tags and special tokens, and `tool_parts` what all have in common.
"""
