"""Settings of the table `[agent]`: the program whose episodes are trained, and the endpoint at
which it asks for its turns.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rollstream.errors import ConfigurationError
from rollstream.storage.settings import INCIDENTAL, Settings


class AgentSettings(Settings):
    """A program that runs episodes of many turns and asks the rollouts for its answers, over the
    protocol of OpenAI (docs/how-to/train-an-agent.md). At most one of `episode`, `command` and
    `service` is given; without any, trajectories are answers to prompts.
    """

    episode: str = ""
    """`module:function` of an async function `episode(client, task) -> reward`, which is called for
    each episode in processes beside the rollout.
    """
    command: tuple[str, ...] = Field(default=(), max_length=256)
    """Program and arguments that are started for each episode, with `OPENAI_BASE_URL` and
    `OPENAI_API_KEY` in its environment. Exit code 0 ends the episode, any other fails it.
    """
    service: bool = False
    """Episodes are run by programs elsewhere, which open them with `POST /sessions`."""
    endpoint: Annotated[str, INCIDENTAL] = Field(
        default="127.0.0.1:0", pattern=r"^[A-Za-z0-9.\-]*:[0-9]{1,5}$"
    )
    """Host and port at which a rollout listens for agents; port 0 is any free one. With several
    rollouts on a machine only port 0 works.
    """
    host: Annotated[str, INCIDENTAL] = Field(default="", pattern=r"^[A-Za-z0-9.\-]*$")
    """Name under which other machines reach this one, where `endpoint` listens on all addresses;
    default: the host of `endpoint`.
    """
    front: Annotated[str, INCIDENTAL] = Field(
        default="", pattern=r"^([A-Za-z0-9.\-]*:[0-9]{1,5})?$"
    )
    """Host and port at which the role `endpoint` listens, one address for the episodes of all
    rollouts; empty: `rollstream run` starts no such process.
    """
    processes: Annotated[int, INCIDENTAL] = Field(default=1, ge=1, le=256)
    """Processes per rollout that run `episode`."""
    commands_max: Annotated[int, INCIDENTAL] = Field(default=64, ge=1, le=65536)
    """Most processes of `command` that run together per rollout; `rollouts.episodes_max` bounds the
    open episodes of the other kinds.
    """
    tool_format: Literal[
        "auto", "hermes", "llama3_json", "mistral", "pythonic", "openai", "qwen3_coder", "glm45",
        "deepseek_v3", "kimi_k2", "minimax_m2", "seed_oss", "atem", "gemma4", "lfm2",
        "phi4_mini_json", "granite", "nemotron_json", "hunyuan_a13b", "cohere",
    ] = "auto"  # fmt: skip
    """How the model writes calls of tools; `auto`: by the words of its chat template. With a
    template in which none is recognised, requests with tools are refused.
    """
    renderer: str = Field(default="none", pattern=r"^[a-z0-9][a-z0-9.\-]*$")
    """Renderer of the library `renderers` that finds the tokens between two turns: its name, `auto`
    for one that renders chats as the model's chat template does, or `none`. What it does not bridge
    is spliced by the chat template.
    """
    turns_max: int = Field(default=64, ge=1, le=4096)
    """Most turns of an episode; a request for another one is refused."""
    setup_s: Annotated[float, INCIDENTAL] = Field(default=60.0, gt=0)
    """Most seconds from the start of an episode to its first request."""
    episode_s: Annotated[float, INCIDENTAL] = Field(default=600.0, gt=0)
    """Most seconds of an episode, from its first request on."""
    body_bytes_max: Annotated[int, INCIDENTAL] = Field(default=8 << 20, ge=1024)
    """Largest body of a request in bytes."""
    key_env: Annotated[str, INCIDENTAL] = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Environment variable with the key that a `service` sends to open sessions. Without it only
    programs on the same machine may open sessions.
    """

    @property
    def is_active(self) -> bool:
        return bool(self.episode or self.command or self.service)

    def open_max(self, episodes_max: int) -> int:
        """Returns the most episodes that may be open together in a rollout;
        `rollouts.episodes_max` is given.
        """
        return min(self.commands_max, episodes_max) if self.command else episodes_max


def service_key(variable: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the key in this environment variable; "" without it. A file that was mounted into the
    variable may have ended its line.
    """
    return environment.get(variable, "").strip()


def require_service_key(variable: str) -> None:
    """Raise `ConfigurationError` if the environment variable `agent.key_env` is not there: every
    session would be refused, and the run would wait for ever.
    """
    if variable and not service_key(variable):
        raise ConfigurationError(
            f"agent.key_env = {variable!r}: the environment has no variable {variable}; set it to "
            "the key that your service sends"
        )
