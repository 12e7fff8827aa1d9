"""Runs one role in this process, and defines the small roles."""

import logging
import os
import resource
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rollstream.errors import ConfigurationError, Fenced, StoreError
from rollstream.look.query.own_runs import remember_begun
from rollstream.run.config.config import fingerprint, truncates_log
from rollstream.run.config.recorded_configuration import watch_configuration
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.metrics.endpoint import ProcessMetrics, serve_metrics
from rollstream.run.role_catalogue import ROLES
from rollstream.run.roles.completion import is_complete, stop_when_complete
from rollstream.run.roles.context import RoleContext, RoleLaunch, await_model, open_role_context
from rollstream.storage.identity import check_exists, read_or_create_identity
from rollstream.storage.lease_renewal import LeaseRenewal
from rollstream.storage.leases import Lease, LeaseCandidate, acquire_lease
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.settings import folder_for
from rollstream.storage.skipped_rows import SkippedRecord, write_skipped_rows
from rollstream.storage.stores.connect import check_conditional_writes
from rollstream.storage.weight_paths import open_publish_hook, open_weight_source

log = logging.getLogger(__name__)

# Of a standby, which the supervisor ends when the run ends.
LEASE_WAIT_S = 30 * 86_400.0
# The archive gets a tenth of a core's time while other processes want it.
ARCHIVE_NICENESS = 10


def run_role(launch: RoleLaunch) -> bool:
    """Runs the role until it is done (True) or stopped (False); with `until_complete` a role
    without an end is done with the run. Raises `Fenced` if a higher term took the role over, and
    `ConfigurationError` if the run's store has another configuration or does not obey conditional
    writes.
    """
    c, watch, role = launch.configuration, ProcessMetrics(launch.stop), ROLES[launch.role]
    with (
        serve_metrics(c, launch.folder, launch.role, launch.name, watch),
        open_role_context(launch, watch) as context,
    ):
        try:
            if not role.reads_only:
                check_conditional_writes(context.store, c.store, uuid.uuid4().hex)
                identity = read_or_create_identity(context.store, c.run)
                remember_begun(identity.id, c.model_dump(mode="json"), launch.folder)
            accepted = launch.accept_config or role.follows_configuration
            with watch_configuration(context.store, c, launch.stop, accepted):
                return _run_until_complete(context) if launch.until_complete else _run(context)
        finally:
            try:
                _record_usage(launch.folder, launch.name)
            # A full disk must not fail a role that has ended well.
            except StoreError as error:
                log.warning("the use of memory and CPU is not recorded: %s", error)


def _run(context: RoleContext) -> bool:
    role = ROLES[context.role]
    if role.needs_model and not await_model(context):
        return False
    return role.load()(context)


def _run_until_complete(context: RoleContext) -> bool:
    steps, role = context.configuration.trainer.steps, ROLES[context.role]
    ask = partial(is_complete, context.store, steps)
    with stop_when_complete(ask, context.stop, role.stops_last) as complete:
        try:
            is_done = _run(context)
        # A standby that is stopped raises it (`_acquire`).
        except SystemExit:
            if not complete.is_set():
                raise
            return True
    return is_done or complete.is_set()


def evaluate_versions(
    configuration: Configuration, folder: Path, numbers: Sequence[int]
) -> Iterator[dict[str, object]]:
    from rollstream.run.roles.evaluation import evaluate_stored

    launch = RoleLaunch(
        role="eval",
        configuration=configuration,
        folder=folder,
        name="evaluation",
        stop=threading.Event(),
        nonce="",
    )
    with open_role_context(launch, ProcessMetrics(launch.stop)) as context:
        yield from evaluate_stored(context, numbers)


def _record_usage(folder: Path, name: str) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    line = {
        "time_s": time.time(),
        "pid": os.getpid(),
        # Linux counts KiB.
        "peak_mb": round(used.ru_maxrss / 1024, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
    }
    with MetricsFile(RunFolder(folder).metrics / f"process-{name}.jsonl") as metrics:
        metrics.append(line)


@contextmanager
def hold_role_lease(context: RoleContext, role: str, duration_s: float) -> Generator[Lease]:
    """Waits for the role's lease and holds it while the block runs; its end releases the lease,
    unless the block raises. Raises `ConfigurationError` if the run was deleted meanwhile.

    If another process took the role, or the store failed for the lease's whole duration, the
    renewing thread sets `context.stop`, and the end of the block raises `Fenced`. So two holders
    never act side by side for long; records of the earlier one are void (invariant 7).
    """
    candidate = LeaseCandidate(role, context.name, context.nonce, duration_s, context.handed_nonce)
    lease = _acquire(context, candidate)
    try:
        check_exists(context.store, context.configuration.run)
    except ConfigurationError:
        lease.release()
        raise
    context.watch.offer(lease.metric_values)
    with LeaseRenewal(lease, on_lost=lambda error: context.stop.set()) as renewal:
        yield lease
    if renewal.lost.is_set():
        raise Fenced(f"role {role}: the lease of term {lease.term} was lost")
    lease.release()


def _acquire(context: RoleContext, candidate: LeaseCandidate) -> Lease:
    """Waits as a standby. A stop meanwhile ends the process with exit code 143."""

    def sleep(seconds: float) -> None:
        if context.stop.wait(seconds):
            # 0 would mean that the role's work is done.
            raise SystemExit(143)

    return acquire_lease(context.store, candidate, LEASE_WAIT_S, time.monotonic, sleep)


def run_prompts(context: RoleContext) -> bool:
    """Publishes prompts four steps ahead of admission. Skipped rows of a data set are written to
    the run's metrics and store.
    """
    from rollstream.look.monitor.state import PROMPTS_FILE, skipped_line
    from rollstream.producers.prompt_source import PromptSource
    from rollstream.producers.row_watch import RowWatch
    from rollstream.run.roles.context import load_run_task, prompt_order

    c, path = context.configuration, RunFolder(context.folder).metrics / PROMPTS_FILE
    task = load_run_task(c, context.folder)
    with MetricsFile(path) as lines:

        def note(records: tuple[SkippedRecord, ...]) -> None:
            lines.append(skipped_line(records, time.time()))
            write_skipped_rows(context.store, records)

        rows = RowWatch(task, note, context.stop)
        order = prompt_order(c, context.folder, task)
        with hold_role_lease(context, "prompts", c.dispatch.lease_s) as lease:
            rows.start()
            ahead = 4 * c.trainer.groups_per_step
            source = PromptSource(context.bus, order, lease.term, ahead, fingerprint(c))
            context.watch.offer(source.metric_values, source.readers)
            context.watch.offer(rows.metric_values)
            try:
                source.run(context.stop)
            finally:
                rows.close()
    return False


def run_dispatch(context: RoleContext) -> bool:
    """Moves, and counts of foreign records, are written to the run's metrics too."""
    from rollstream.consumers.dispatch.admission import AdmissionPace
    from rollstream.consumers.dispatch.service import Dispatch
    from rollstream.look.monitor.state import MOVES_FILE, foreign_line, move_line

    c = context.configuration
    pace = AdmissionPace(
        c.trainer.groups_per_step,
        c.dispatch.max_lag,
        c.dispatch.ready_groups_max,
        c.trainer.steps,
    )
    keep_version = c.rollouts.on_update == "keep_version"
    path = RunFolder(context.folder).metrics / MOVES_FILE
    with (
        hold_role_lease(context, "dispatch", c.dispatch.lease_s) as lease,
        MetricsFile(path) as lines,
    ):
        dispatch = Dispatch(
            context.bus,
            context.store,
            c.dispatch,
            pace,
            keep_version,
            lease.term,
            truncates_log(c),
            has_adapters=c.model.lora.rank > 0,
        )
        dispatch.on_move = lambda move, plan_s: lines.append(move_line(move, plan_s, time.time()))
        dispatch.on_foreign = lambda counts: lines.append(foreign_line(counts, time.time()))
        context.watch.offer(dispatch.metric_values, dispatch.readers)
        dispatch.run(context.stop)
    return False


def run_archive(context: RoleContext) -> bool:
    """Archives at low priority."""
    from rollstream.consumers.archive.service import ArchiveService

    c = context.configuration
    os.nice(ARCHIVE_NICENESS)
    lines = MetricsFile(RunFolder(context.folder).metrics / f"{context.name}.jsonl")
    with lines, hold_role_lease(context, "archive", c.dispatch.lease_s):
        archive = ArchiveService(context.bus, context.store, c.run, c.archive, note=lines.append)
        context.watch.offer(archive.metric_values)
        archive.run(context.stop)
    return False


def run_endpoint(context: RoleContext) -> bool:
    settings = context.configuration.agent
    if not settings.front:
        raise ConfigurationError('agent.front: set it to an address, for example "127.0.0.1:8700"')
    from rollstream.producers.agent_settings import require_service_key
    from rollstream.producers.agents.directory import RolloutDirectory
    from rollstream.producers.agents.front import EndpointFront
    from rollstream.producers.agents.keys import run_session_keys
    from rollstream.producers.agents.serving import EndpointThread

    directory, keys = RolloutDirectory(context.bus), run_session_keys(context.store)
    require_service_key(settings.key_env)
    front = EndpointFront(directory, keys, settings.body_bytes_max, settings.key_env)
    endpoint = EndpointThread(front.app(), settings.front, settings.host)
    context.watch.offer(front.metric_values, directory.readers)
    endpoint.start()
    while not context.stop.wait(1.0):
        pass
    endpoint.close()
    return False


def with_weight_source(context: RoleContext) -> RoleContext:
    """Returns a context with a store that reads versions by the run's shorter way, if it has one
    (`storage/weight_paths.py`).
    """
    settings = context.configuration.relay
    folder = folder_for(settings, context.folder)
    source = open_weight_source(context.store, settings, folder)
    if source is None:
        return context
    context.watch.offer(source.metric_values)
    return replace(context, store=source)


def with_publish_hook(context: RoleContext) -> RoleContext:
    """Returns a context with a store that also sends new versions on while it writes them, if the
    run has a shorter way (`storage/weight_paths.py`).
    """
    hook = open_publish_hook(context.store, context.bus, context.configuration.relay)
    if hook is None:
        return context
    context.watch.dependencies.append(hook.metric_values)
    return replace(context, store=hook)
