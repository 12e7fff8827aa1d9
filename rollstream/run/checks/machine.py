"""Checks this machine: packages, ports, brokers, the run's folder and disk, and GPUs."""

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from rollstream.errors import (
    BusError,
    ConfigurationError,
    CorruptObject,
    NewerRelease,
    ObjectMissing,
    RollstreamError,
)
from rollstream.look.query.permissions import folder_of_url
from rollstream.os_failures import explain_os_error
from rollstream.producers.agent_settings import require_service_key
from rollstream.producers.scoring.build import SERVICES, check_service
from rollstream.run.checks.findings import Finding
from rollstream.run.checks.model import ModelFacts
from rollstream.run.config.run_folder import bus_url, store_url
from rollstream.run.config.run_model import check_starting_model, run_model
from rollstream.run.config.settings import Configuration
from rollstream.run.metrics.endpoint import metrics_port
from rollstream.run.role_catalogue import ROLES
from rollstream.run.sizes.check import check_memory, unassigned_use, uses_gpus
from rollstream.run.supervisor.cards import GpuCard, assign_cards, read_cards
from rollstream.run.supervisor.supervisor import running_message
from rollstream.storage.identity import read_for_acting
from rollstream.storage.relay.client import needed_token
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.pointer import read_pointer
from rollstream.streams.connect import check_client, check_reachable

_INTERPRETER = re.compile(r"python[0-9.]*|node|ruby|perl|php|sh|bash|dash|zsh|lua")
# Options of interpreters that take no argument; the words after another one are not looked at.
_PLAIN_OPTIONS = ("-u", "-B", "-E", "-I", "-O", "-OO", "-P", "-s", "-S")
_OPTION = re.compile(r"-|[A-Za-z_][A-Za-z0-9_]*=")
# A check waits no longer for a store.
STORE_WAIT_S = 10.0
GB, LOG = 1e9, "log"
# Of a parameter in a checkpoint: float32 weights and the two moments of Adam.
MASTER_BYTES = 12
# Bytes that a run of the smallest model needs.
ROOM_MIN = 64 << 20


def assigned_cards(c: Configuration, model: Callable[[], Path]) -> Mapping[str, Sequence[GpuCard]]:
    """The GPUs of each process by `[devices]`; {} for a run that uses none. Raises
    `ConfigurationError` if this machine's GPUs do not allow it, or have too little memory for the
    model in the folder that `model` returns.
    """
    if not uses_gpus(c):
        return {}
    cards = read_cards(os.environ)
    assigned = assign_cards(c, cards)
    check_memory(c, model(), assigned or unassigned_use(c, cards))
    return assigned


def machine_findings(c: Configuration, folder: Path, model: ModelFacts | None) -> Iterator[Finding]:
    try:
        _check_packages(c)
        require_service_key(c.agent.key_env)
        if c.relay.enabled:
            needed_token(c.relay.host)
        if c.scoring.function in SERVICES:
            check_service(c.scoring, os.environ if c.scoring.count else None)
        if model is not None:
            place = model.folder
            assigned_cards(c, lambda: place)
    except ConfigurationError as error:
        yield Finding("machine", "refused", str(error))
    try:
        check_client(bus_url(c, folder))
        check_reachable(c.bus)
    except BusError as error:
        yield Finding(LOG, "refused", str(error))
    except ConfigurationError as error:
        yield Finding("machine", "refused", str(error))
    taken = [line for host, port, what in _ports(c) if (line := _taken(host, port, what))]
    # The run's own processes have the ports.
    if taken and (running := running_message(folder)):
        yield Finding("run", "refused", running)
    elif taken:
        yield Finding("ports", "refused", "; ".join(taken))
    if missing := [name for name in c.task.environment if name not in os.environ]:
        text = f"the environment has no variable {', '.join(missing)}, which task.environment names"
        yield Finding("machine", "warning", text)
    yield from _disk_findings(c, folder, model)
    yield from _device_findings(c)


def _device_findings(c: Configuration) -> Iterator[Finding]:
    devices = {"trainer.device": c.trainer.device, "rollouts.device": c.rollouts.device}
    on_gpu = {name: device for name, device in devices.items() if device.startswith("cuda")}
    # Only a warning: a check may be made for another machine.
    cards = len(read_cards(os.environ)) if on_gpu else 0
    lacking = [
        f"{name} = {device!r}"
        for name, device in on_gpu.items()
        if int(device.partition(":")[2] or 0) >= cards
    ]
    if lacking:
        there = f"nvidia-smi shows {cards} GPUs here, so roles refuse to start on this machine"
        yield Finding("machine", "warning", f"{' and '.join(lacking)}: {there}")


def store_findings(c: Configuration, folder: Path) -> Iterator[Finding]:
    """A refusal if a bucket does not answer soon, if the run was deleted, or if this host has other
    files than the run began with; a note if the bucket holds another folder's run.
    """
    # A `file:` store needs no connection.
    is_begun, is_local = (folder / "config.json").is_file(), c.store.startswith("file:")
    if is_local and not is_begun:
        return
    try:
        store = open_store(store_url(c, folder), c.sync, STORE_WAIT_S)
        if is_begun:
            _check_begun(store, c, folder)
            return
        pointer = read_pointer(store)
    except (ConfigurationError, NewerRelease) as error:
        yield Finding("run" if is_begun else "store", "refused", str(error))
        return
    except (RollstreamError, OSError) as error:
        # The role that reads a folder names the fault there.
        if not is_local:
            yield Finding("store", "refused", str(error))
        return
    version = None if pointer is None else pointer[0].version
    if version is not None:
        number, steps = version.number, c.trainer.steps
        then = "has nothing left to train" if number >= steps else "continues it"
        text = f"its prefix holds a run already, at version {number} of {steps}: this one {then}; "
        yield Finding("store", "warning", text + "for a new run name another prefix")


def _check_begun(store: ObjectStore, c: Configuration, folder: Path) -> None:
    # A run that cannot continue is refused before its log is made again and a changed setting is
    # written. The role that reads missing or corrupt objects names them.
    with suppress(ObjectMissing, CorruptObject):
        read_for_acting(store, c.run)
        check_starting_model(store, c, folder)
    pointer = read_pointer(store)
    version = None if pointer is None else pointer[0].version
    if version is not None and version.number > c.trainer.steps:
        raise ConfigurationError(
            f"trainer.steps = {c.trainer.steps}, and the run has trained {version.number}: ask for "
            "at least as many, or fork the run at an earlier step"
        )


def _check_packages(c: Configuration) -> None:
    needed = {
        "rollouts.engine": c.rollouts.kind.package(c.rollouts),
        "agent.episode": ("openai", "agents") if c.agent.episode else None,
        "trainer.optimiser": (
            ("bitsandbytes", "lowbit") if c.trainer.optimiser == "adamw_8bit" else None
        ),
    }
    for setting, package in needed.items():
        if package is not None and find_spec(package[0]) is None:
            raise ConfigurationError(
                f"{setting} needs the package {package[0]}: pip install 'rollstream[{package[1]}]'"
            )
    if c.agent.command:
        _check_command(c.agent.command)


def _check_command(command: Sequence[str]) -> None:
    program, *arguments = command
    if shutil.which(program) is None:
        is_file = Path(program).is_file()
        fault = f"{program!r} may not be executed (chmod +x)" if is_file else f"no {program!r}"
        where = "" if is_file else " on PATH" if os.sep not in program else f" in {os.getcwd()}"
        raise ConfigurationError(f"agent.command: {fault}{where}")
    if Path(program).name == "env" and arguments and not _OPTION.match(arguments[0]):
        _check_command(arguments)
    if not _INTERPRETER.fullmatch(Path(program).name):
        return
    while arguments and arguments[0] in _PLAIN_OPTIONS:
        arguments = arguments[1:]
    script = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    # Shells look for scripts on PATH, too.
    if script and not Path(script).exists() and shutil.which(script) is None:
        raise ConfigurationError(
            f"agent.command: no file {script!r} in {os.getcwd()}, where the command is "
            f"started, for {program} to run"
        )


def _ports(c: Configuration) -> Iterator[tuple[str, int, str]]:
    base = metrics_port(c, os.environ)
    if c.metrics.enabled and base:
        names = ["supervisor", *(name for role in ROLES.values() for name in role.processes(c))]
        for number, name in enumerate(names):
            yield c.metrics.host, base + number, f"metrics.port + {number}, for {name}"
    for setting, address in (("agent.endpoint", c.agent.endpoint), ("agent.front", c.agent.front)):
        host, _, port = address.rpartition(":")
        if c.agent.is_active and port.isdecimal() and int(port):
            yield host, int(port), setting
    if c.relay.enabled and c.relay.port:
        yield c.relay.host, c.relay.port, "relay.port"


def _taken(host: str, port: int, what: str) -> str:
    """Returns why no process can listen there; "" if one can."""
    if port > 65535:
        return f"port {port} ({what}) is above 65535"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # The port is bound for a moment, then free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except UnicodeError:
        return f"{host}:{port} ({what}) cannot be listened on: {host!r} is no host's name"
    except OSError as error:
        return f"{host}:{port} ({what}) cannot be listened on: {error.strerror or error}"
    return ""


def _disk_findings(c: Configuration, folder: Path, model: ModelFacts | None) -> Iterator[Finding]:
    bus, store = folder_of_url(bus_url(c, folder)), folder_of_url(store_url(c, folder))
    advised = {
        folder: ("the run's folder", "choose another --run DIR"),
        bus: ("the log's folder", "set another bus"),
        store: ("the store's folder", "set another store"),
    }
    places = {path: _present_parent(path) for path in advised if path is not None}
    for path, place in places.items():
        what, advice = advised[path]
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            text = f"{unwritable_reason(path, place, what)}; {advice}"
            yield Finding("disk", "refused", text)
            return
    if store is None:
        yield _room(folder, places[folder], ROOM_MIN, ROOM_MIN, advised[folder][1])
        return
    start_bytes, needed = _store_bytes(c, folder, model)
    if places[folder].stat().st_dev == places[store].stat().st_dev:
        yield _room(
            folder, places[folder], ROOM_MIN + start_bytes, ROOM_MIN + needed, advised[folder][1]
        )
        return
    yield _room(folder, places[folder], ROOM_MIN, ROOM_MIN, advised[folder][1])
    yield _room(store, places[store], start_bytes, needed, advised[store][1])


def _present_parent(path: Path) -> Path:
    """The path, or the nearest folder above it that exists, without links."""
    real = path.resolve()
    return next(place for place in (real, *real.parents) if place.exists())


def _room(folder: Path, place: Path, start_bytes: int, needed: int, advice: str) -> Finding:
    free = shutil.disk_usage(place).free
    figures = {"disk_free_bytes": free, "disk_needed_bytes": needed}
    text = f"{free / GB:,.1f} GB free for {folder}"
    if free < start_bytes:
        text += f", and the run needs {start_bytes / GB:,.1f} GB at its start; {advice}"
        return Finding("disk", "refused", text, figures)
    if free < needed:
        text += (
            f", and versions and checkpoints may take {needed / GB:,.1f} GB (weights.versions_max, "
            "checkpoints.keep)"
        )
        return Finding("disk", "warning", text, figures)
    return Finding("disk", "ok", text, figures)


def unwritable_reason(folder: Path, place: Path, what: str = "the run's folder") -> str:
    """Returns why no file can be made in `folder`; its parent `place` exists, or is `folder`."""
    if not place.is_dir():
        number, path = errno.ENOTDIR, f"{place}: "
    else:
        is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        number, path = (errno.EROFS if is_read_only else errno.EACCES), ""
    reason = path + explain_os_error(OSError(number, os.strerror(number)))
    if place == folder.resolve():
        return f"{what} {folder} may not be written by this user: {reason}"
    return f"{what} {folder} cannot be made in {place}: {reason}"


def _store_bytes(c: Configuration, folder: Path, model: ModelFacts | None) -> tuple[int, int]:
    """Returns the bytes in a store's folder at the run's start, and the most of model, kept
    versions and checkpoints, without deltas.
    """
    if model is None:
        return 0, 0
    start_bytes = model.bytes
    with suppress(RollstreamError, OSError):  # another line names what is wrong with the store
        # A resume copies nothing.
        start_bytes = 0 if run_model(c, folder) is not None else start_bytes
    item = 4 if c.weights.dtype == "float32" else 2
    versions = c.weights.versions_max * item * model.parameters
    checkpoints = (c.checkpoints.keep + 1) * MASTER_BYTES * model.parameters
    return start_bytes, start_bytes + versions + checkpoints
