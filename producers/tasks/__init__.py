"""Tasks: the prompts, their order, and how an answer is judged.

`base` is the contract, `registry` builds a task by its name or from your own module. Built in:
`remainder` (arithmetic), `scripted` (several turns, and prompts without content), `dataset` (a file
of `rows`), `gym` (reasoning_gym) and `mixture` (several tasks by weight). Tasks of text use `text`
with `text_tokenizer`; the others use `character_tokenizer`.
"""
