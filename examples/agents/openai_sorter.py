"""An agent of the library openai-agents, which keeps the history in a form of its own:
`python openai_sorter.py LETTERS`, with OPENAI_BASE_URL and OPENAI_API_KEY in the environment. The
library takes an answer that was cut at `max_tokens` for an error of the model, except over the
route of chat completions.
"""

import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    set_default_openai_api,
    set_tracing_disabled,
)

set_tracing_disabled(True)
set_default_openai_api("chat_completions")
agent = Agent(name="sorter", model="policy", model_settings=ModelSettings(max_tokens=10))
first = Runner.run_sync(agent, sys.argv[1])
if first.final_output != "".join(sorted(sys.argv[1])):
    again = {"role": "user", "content": sys.argv[1]}
    Runner.run_sync(agent, [*first.to_input_list(), again])
