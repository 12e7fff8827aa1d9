"""The role `relay`: this node's cache of weight versions."""

from rollstream.run.roles.context import RoleContext
from rollstream.storage.relay.relay import Relay
from rollstream.storage.settings import folder_for


def run_relay(context: RoleContext) -> bool:
    """Takes the next term of all relays and serves versions until the role is stopped."""
    settings = context.configuration.relay
    folder = folder_for(settings, context.folder)
    relay = Relay(context.bus, context.store, settings, context.name, folder)
    context.watch.offer(relay.metric_values, relay.readers)
    relay.run(context.stop)
    return False
