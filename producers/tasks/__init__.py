"""Tasks: the prompts, their order, and how an answer is judged.

`base` is the contract, `registry` builds a task by its name or from your own module. Built in:
`remainder` (arithmetic), `automaton` (answers of unlike lengths), `scripted` (several turns, and
prompts without content), `dataset` (files, found and read by `producers/rows`, `dataset_rows` takes
the rows and `dataset_survey` looks at them before a run), `gym` (reasoning_gym),
`tool_dialogue` (the tools of an MCP server, by `tool_server` and `tool_command`) and `mixture`
(several tasks by weight). Tasks of text use `text`, from
scratch with `trained_tokenizer`; the others use `character_tokenizer`. `tool_calls` finds the calls
of tools in an answer, `code_environment` has the variables of a user's code.
"""
