"""Gives a rollout what it needs to run episodes of agents (`serve_agents`): the endpoint, the keys of
sessions and the programs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rollstream.errors import ConfigurationError
from rollstream.producers.agents.chat_format import chat_format
from rollstream.producers.agents.episodes import AgentEpisodes
from rollstream.producers.agents.inbox import AgentInbox
from rollstream.producers.agents.keys import run_session_keys
from rollstream.producers.agents.programs import open_programs
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.tasks.base import Task
from rollstream.roles.context import RoleContext

if TYPE_CHECKING:
    from rollstream.producers.agents.serving import EndpointThread


def serve_agents(context: RoleContext, rollout: RolloutLoop, task: Task) -> "EndpointThread":
    """Make the rollout run its trajectories as episodes, and listen for their programs. Returns the
    endpoint. Raises `ConfigurationError` without the libraries of the extra `agents`.
    """
    c = context.configuration
    check_agent_libraries(c.agent.episode)
    from rollstream.producers.agents.endpoint import AgentEndpoint
    from rollstream.producers.agents.serving import EndpointThread, endpoint_url

    chat = chat_format(task)

    def prompt_text(running: RunningTrajectory) -> str:
        return chat.decode(running.assignment.tokens.tolist())

    agents = AgentEpisodes(
        rollout.engine,
        rollout.ended_turns,
        rollout.publisher,
        c.agent,
        chat,
        run_session_keys(context.store),
        open_programs(c.agent.episode, c.agent.command, c.agent.processes, c.task.environment),
        AgentInbox(),
        keep_version=c.rollouts.on_update == "keep_version",
        prompt_text=prompt_text,
    )
    app = AgentEndpoint(agents, c.run, c.rollouts.context_max).app()
    endpoint = EndpointThread(app, c.agent.endpoint)
    agents.url = endpoint_url(c.agent.endpoint, endpoint.port, c.agent.host)
    rollout.publisher.url = agents.url
    rollout.in_progress.run_agents(agents)
    endpoint.start()
    return endpoint


def check_agent_libraries(episode: str) -> None:
    """Raise `ConfigurationError` if a library of the extra `agents` is missing."""
    for name in ("starlette", "uvicorn", *(["openai"] if episode else [])):
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"[agent] needs the library {name}: pip install 'rollstream[agents]' ({error})"
            ) from error
