"""docker-compose.yml is valid without a daemon: accepted by the program where it is installed, and
by structure everywhere.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rollstream.run.cli.main import parse
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.supervisor.plan import process_specs
from testbed.servers import kafka_broker, versity
from testbed.waiting import WAIT_S
from tests.compose.compose_file import FILE, FOLDER, PORT, ROOT, VARIABLE, Service, services

QUICKSTART = ROOT / "examples" / "quickstart.toml"
STACKS = ROOT / "deploy" / "stacks"
EXPLORER, REPORT = services()["explorer"], services()["report"]
LONG_LIVED = [
    service
    for service in services().values()
    if service.is_role and not service.ends and service.name not in (EXPLORER.name, REPORT.name)
]


def rollstream_arguments(service: Service) -> list[str]:
    """The arguments of `rollstream` in its command, also where a shell starts it."""
    words = [word.replace("$(hostname)", "host") for word in service.command]
    return (words[2].removeprefix("exec ").split() if words[:2] == ["sh", "-c"] else words)[1:]


def test_the_program_accepts_the_file() -> None:
    """Where the program is installed; the other tests read the same file by PyYAML."""
    assert yaml.safe_load(FILE.read_text())["services"]
    if shutil.which("docker-compose") is not None:
        command = ["docker-compose", "--file", str(FILE), "config", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr


def test_every_role_of_the_quickstart_has_a_service() -> None:
    configuration = load(QUICKSTART, environment={})
    wanted = {
        seat.command[seat.command.index("rollstream") + 1]
        for seat in process_specs(configuration, RunFolder(ROOT))
    }
    always = [service for service in LONG_LIVED if not service.profiles]
    assert {rollstream_arguments(service)[0] for service in always} == wanted


def test_the_image_is_built_by_one_service_that_all_roles_wait_for() -> None:
    found = services()
    assert [service.name for service in found.values() if "build" in service.settings] == ["bucket"]
    for service in found.values():
        if service.is_role and service.name != "bucket":
            assert set(service.after) & {"bucket", "warmup"}, service.name
            assert service.settings["pull_policy"] == "never", service.name


def test_everything_that_crashes_is_started_again() -> None:
    for service in services().values():
        if not service.profiles or service.is_role:
            assert service.settings["restart"].startswith(("on-failure", "unless-stopped"))


@pytest.mark.parametrize("service", LONG_LIVED, ids=lambda service: service.name)
def test_a_role_ends_with_the_run(service: Service) -> None:
    """Its exit code 0 is final."""
    assert service.settings["restart"] == "on-failure"
    arguments = parse(rollstream_arguments(service))
    assert getattr(arguments, "until_complete", True)


def test_the_explorer_is_published_on_this_machine_alone_and_needs_a_token() -> None:
    arguments = parse(rollstream_arguments(EXPLORER))
    assert (arguments.runs, arguments.host) == ([FOLDER], "0.0.0.0")
    assert EXPLORER.settings["ports"] == [f"127.0.0.1:{arguments.port}:{arguments.port}"]
    assert not arguments.sql
    assert "ROLLSTREAM_EXPLORER_TOKEN" in EXPLORER.environment  # empty: a new one is printed


@pytest.mark.parametrize("service", LONG_LIVED, ids=lambda service: service.name)
def test_a_service_runs_a_command_that_exists_on_a_file_that_the_image_has(
    service: Service,
) -> None:
    arguments = parse(rollstream_arguments(service))
    assert (ROOT / arguments.configuration).is_file()
    assert arguments.configuration.startswith("examples/")  # deploy/Dockerfile copies it


@pytest.mark.parametrize("service", LONG_LIVED, ids=lambda service: service.name)
def test_the_health_of_a_service_is_checked_where_it_serves_it(service: Service) -> None:
    assert service.health[:2] == ["bash", "-c"]  # no Python, which starts for a third of a second
    assert f"/127.0.0.1/{PORT} " in service.health[2]
    assert "GET /healthz " in service.health[2]
    assert service.environment["ROLLSTREAM_METRICS_PORT"] == PORT
    assert service.environment["ROLLSTREAM_METRICS__HOST"] == "0.0.0.0"  # Prometheus is outside


def test_the_environment_is_a_valid_configuration() -> None:
    environment = services()["trainer"].environment
    configuration = load(QUICKSTART, environment=environment)
    assert configuration.bus == environment["ROLLSTREAM_BUS"]
    assert configuration.store == environment["ROLLSTREAM_STORE"]


def test_servers_are_the_ones_that_the_tests_run_and_their_secrets_match() -> None:
    found = services()
    kafka, objects = found["kafka"], found["object-store"]
    assert kafka.settings["image"].endswith(f":{kafka_broker.VERSION}")
    assert objects.settings["image"].endswith(f":{versity.VERSION}")
    for service in LONG_LIVED:
        given = service.environment
        assert given["AWS_ACCESS_KEY_ID"] == objects.environment["ROOT_ACCESS_KEY"]
        assert given["AWS_SECRET_ACCESS_KEY"] == objects.environment["ROOT_SECRET_KEY"]


def test_everything_that_is_waited_for_exists_and_can_come_true() -> None:
    found = services()
    for service in found.values():
        for name, condition in service.after.items():
            if condition == "service_healthy":
                assert found[name].health, f"{service.name} waits for the health of {name}"
            if condition == "service_completed_successfully":
                assert found[name].ends, f"{service.name} waits for the end of {name}"


def test_volumes_are_declared_and_mounted_files_are_there() -> None:
    declared = yaml.safe_load(FILE.read_text())["volumes"]
    for service in services().values():
        for mount in service.settings.get("volumes", ()):
            source = mount.split(":")[0]
            exists = (ROOT / source).exists() if source.startswith(".") else source in declared
            assert exists, f"{service.name}: {mount}"


def test_prometheus_scrapes_every_role() -> None:
    settings = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    (lookup,) = settings["scrape_configs"][0]["dns_sd_configs"]
    always = {service.name for service in LONG_LIVED if not service.profiles}
    assert always <= set(lookup["names"]) <= set(services())
    assert str(lookup["port"]) == PORT


@pytest.mark.parametrize("path", sorted(STACKS.glob("*.env")), ids=lambda path: path.stem)
def test_a_stack_is_a_run_of_its_own_with_a_valid_configuration(path: Path) -> None:
    """Its volumes and its log are not those of another stack."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    given = dict(line.split("=", 1) for line in lines)
    assert given.pop("COMPOSE_PROJECT_NAME") == f"rollstream-{path.stem}"
    for file in filter(None, given.pop("COMPOSE_FILE", "").split(":")):
        assert (ROOT / file).is_file()
    found = services(given)
    for profile in filter(None, given.pop("COMPOSE_PROFILES", "").split(",")):
        assert any(profile in service.profiles for service in found.values())
    assert set(given) <= {name for name, _ in VARIABLE.findall(FILE.read_text())}
    environment = found["trainer"].environment
    configuration = load(
        ROOT / given.get("CONFIG", "examples/quickstart.toml"), environment=environment
    )
    assert configuration.bus.endswith(f"/{given['RUN']}")
    assert configuration.relay.enabled == (given.get("RELAY") == "true")
