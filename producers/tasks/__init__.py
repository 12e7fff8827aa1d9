"""Tasks: the prompts, their order, and how an answer is judged.

`base` is the contract, `registry` builds a task by its name or from your own module. Built in:
`remainder` (arithmetic), `automaton` (answers of unlike lengths), `scripted` (several turns, and
prompts without content), `dataset` (files, found by `data_files`, read by `row_files`, `csv_table`
and `dataset_rows`, and looked at before a run by `dataset_survey`), `gym` (reasoning_gym),
`tool_dialogue` (the tools of an MCP server, by `tool_server` and `tool_command`) and `mixture`
(several tasks by weight). Tasks of text use `text` with `text_tokenizer`, or with
`trained_tokenizer` from scratch; the others use `character_tokenizer`. `tool_calls` finds the calls
of tools in an answer.
"""
