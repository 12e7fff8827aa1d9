"""An agent of the library openai-agents, which asks over the route of responses and keeps the
history in its own form. `python openai_sorter.py LETTERS`, with OPENAI_BASE_URL and OPENAI_API_KEY
in the environment.
"""

import sys

from agents import Agent, ModelSettings, Runner, set_tracing_disabled

set_tracing_disabled(True)
agent = Agent(name="sorter", model="policy", model_settings=ModelSettings(max_tokens=10))
first = Runner.run_sync(agent, sys.argv[1])
if first.final_output != "".join(sorted(sys.argv[1])):
    again = {"role": "user", "content": sys.argv[1]}
    Runner.run_sync(agent, [*first.to_input_list(), again])
