"""Gives a rollout what it needs to run episodes of agents (`serve_agents`): keys, programs and the
endpoint.
"""

from rollstream.producers.agents.chat_format import chat_format
from rollstream.producers.agents.endpoint import AgentEndpoint
from rollstream.producers.agents.episodes import AgentEpisodes
from rollstream.producers.agents.inbox import AgentInbox
from rollstream.producers.agents.keys import run_session_keys
from rollstream.producers.agents.programs import open_programs
from rollstream.producers.agents.renderer_bridge import with_renderer
from rollstream.producers.agents.serving import EndpointThread, endpoint_url
from rollstream.producers.agents.settings import AgentSettings, require_service_key
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Task
from rollstream.storage.stores.base import ObjectStore


def serve_agents(
    rollout: RolloutLoop,
    store: ObjectStore,
    task: Task,
    settings: AgentSettings,
    task_settings: TaskSettings,
    model: str,
) -> EndpointThread:
    """Make the rollout run its trajectories as episodes, and listen for their programs. `model` is
    the name of the model in answers. Returns the endpoint, which the caller closes.
    """
    require_service_key(settings.key_env)
    chat = with_renderer(chat_format(task, settings.tool_format), settings.renderer)

    def prompt_text(running: RunningTrajectory) -> str:
        return chat.user_text(running.assignment.tokens.tolist())

    agents = AgentEpisodes(
        rollout.engine,
        rollout.ended_turns,
        rollout.publisher,
        settings,
        chat,
        run_session_keys(store),
        open_programs(settings, task_settings),
        AgentInbox(),
        keep_version=rollout.settings.on_update == "keep_version",
        prompt_text=prompt_text,
    )
    app = AgentEndpoint(agents, model, rollout.settings.context_max).app()
    endpoint = EndpointThread(app, settings.endpoint, settings.host)
    agents.url = endpoint_url(settings.endpoint, endpoint.port, settings.host)
    rollout.publisher.url = agents.url
    rollout.in_progress.run_agents(agents)
    endpoint.start()
    return endpoint
