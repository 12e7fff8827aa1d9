"""Opens the driver of episodes (`open_episodes`)."""

from importlib.util import find_spec

from rollstream.errors import ConfigurationError
from rollstream.producers.agent_settings import AgentSettings, require_service_key
from rollstream.producers.agents.episodes import AgentEpisodes
from rollstream.producers.agents.inbox import AgentInbox
from rollstream.producers.agents.keys import run_session_keys
from rollstream.producers.agents.programs import open_programs
from rollstream.producers.rollout.turn_driver import DriverScope, RolloutParts
from rollstream.producers.tasks.base import Task


def open_episodes(parts: RolloutParts, task: Task, scope: DriverScope) -> AgentEpisodes:
    """Returns the driver, whose endpoint listens from now on. Raises `ConfigurationError` if a
    library of the extra `agents` or the service's key is missing.
    """
    settings = scope.agent
    _require_libraries(settings)
    require_service_key(settings.key_env)
    # Not before it is known that the libraries are there, which these need.
    from rollstream.producers.agents.chat_format import chat_format
    from rollstream.producers.agents.endpoint import AgentEndpoint
    from rollstream.producers.agents.renderer_bridge import with_renderer
    from rollstream.producers.agents.serving import EndpointThread, endpoint_url

    chat = with_renderer(
        chat_format(task, settings.tool_format, scope.task.system), settings.renderer
    )
    agents = AgentEpisodes(
        parts,
        settings,
        chat,
        run_session_keys(scope.store),
        open_programs(settings, scope.task),
        AgentInbox(),
        scope.task.retries,
        prompt_text=lambda running: chat.user_text(running.assignment.tokens.tolist()),
        system_text=lambda running: chat.system_text(running.assignment.tokens.tolist()),
    )
    app = AgentEndpoint(agents, scope.model, parts.settings.context_max).app()
    agents.endpoint = EndpointThread(app, settings.endpoint, settings.host)
    agents.url = endpoint_url(settings.endpoint, agents.endpoint.port, settings.host)
    parts.publisher.url = agents.url
    agents.endpoint.start()
    return agents


def _require_libraries(settings: AgentSettings) -> None:
    for name in ("starlette", "uvicorn", *(["openai"] if settings.episode else [])):
        if find_spec(name) is None:
            raise ConfigurationError(
                f"[agent] needs the library {name}: pip install 'rollstream[agents]'"
            )
