"""A process's endpoint: the metrics it serves, and that no request harms the role."""

import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rollstream.metric_values import MetricHistogram
from rollstream.run.config.settings import Configuration, MetricsSettings
from rollstream.run.metrics import endpoint as endpoint_module
from rollstream.run.metrics.endpoint import (
    REQUESTS_MAX,
    ProcessMetrics,
    endpoint_file,
    metrics_port,
    serve_metrics,
)
from testbed.scraping import endpoint, get, scrape, value
from testbed.waiting import WAIT_S, wait_for

PLAIN = Configuration(run="tiny")


def test_figures_are_served_with_run_role_and_name(tmp_path: Path):
    watch = ProcessMetrics(threading.Event())
    watch.offer(lambda: {"prompts_ahead": 3, "dispatch_orders_total": {"start": 2, "resume": 1}})
    with serve_metrics(PLAIN, tmp_path, "prompts", "p-1", watch, {}):
        found = scrape(endpoint(tmp_path, "p-1")["url"])
    labels = {"run": "tiny", "role": "prompts", "name": "p-1"}
    assert found["rollstream_prompts_ahead"] == [(labels, 3.0)]
    assert value(found, "rollstream_dispatch_orders_total", kind="resume", **labels) == 1
    assert value(found, "process_resident_memory_bytes", **labels) > 1e6


def test_a_tally_is_a_histogram(tmp_path: Path):
    watch, tally = ProcessMetrics(threading.Event()), MetricHistogram((0, 1, 2))
    for lag, tokens in ((0, 5), (1, 3), (2, 1), (7, 2)):
        tally.add(lag, tokens)
    watch.offer(lambda: {"lag_steps": tally})
    with serve_metrics(PLAIN, tmp_path, "train", "trainer", watch, {}):
        found = scrape(endpoint(tmp_path, "trainer")["url"])
    buckets = {given["le"]: v for given, v in found["rollstream_lag_steps_bucket"]}
    assert buckets == {"0.0": 5, "1.0": 8, "2.0": 9, "+Inf": 11}
    assert value(found, "rollstream_lag_steps_count") == 11
    assert value(found, "rollstream_lag_steps_sum") == 3 + 2 + 14


def test_a_source_that_fails_costs_its_own_figures_only(tmp_path: Path, caplog):
    def broken() -> dict[str, float]:
        raise RuntimeError("no figures today")

    watch = ProcessMetrics(threading.Event())
    watch.offer(broken)
    watch.offer(lambda: {"prompts_ahead": 3, "no_such_figure": 1})
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", watch, {}):
        scrape(endpoint(tmp_path, "p")["url"])
        found = scrape(endpoint(tmp_path, "p")["url"])
    assert value(found, "rollstream_prompts_ahead") == 3
    assert value(found, "rollstream_scrape_errors_total") == 4
    assert caplog.text.count("no figures today") == 1
    assert "'no_such_figure' is not in" in caplog.text


class SilentReader:
    """A reader whose brokers do not answer."""

    topic, dead, void, lost = "weights", 2, 0, 0

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.asked = 0

    def behind(self) -> int:
        self.asked += 1
        assert self.answer.wait(60)
        return 7


def test_brokers_that_do_not_answer_cost_the_lag_only(tmp_path: Path, monkeypatch):
    """A broker may take a minute to fail; each scrape answers within its own time meanwhile."""
    monkeypatch.setattr(endpoint_module, "LAG_S", 0.05)
    watch, reader = ProcessMetrics(threading.Event()), SilentReader()
    watch.offer(lambda: {"prompts_ahead": 3}, lambda: [reader])  # pyright: ignore[reportArgumentType]
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", watch, {}):
        url = endpoint(tmp_path, "p")["url"]
        for _ in range(2):
            found = scrape(url)
            assert value(found, "rollstream_prompts_ahead") == 3
            assert value(found, "rollstream_reader_dead_total", topic="weights") == 2
            assert "rollstream_reader_behind_records" not in found
        assert reader.asked == 1
        reader.answer.set()
        wait_for(lambda: "rollstream_reader_behind_records" in scrape(url))
        found = scrape(url)
    assert value(found, "rollstream_reader_behind_records", topic="weights") == 7


def test_a_port_in_use_is_a_warning_and_the_role_continues(tmp_path: Path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        configuration = Configuration(run="tiny", metrics=MetricsSettings(port=port))
        stale = endpoint_file(tmp_path, "p")
        stale.parent.mkdir(parents=True)
        stale.write_text("{}")
        with serve_metrics(
            configuration, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}
        ):
            assert not stale.exists()
    assert f"127.0.0.1 port {port}" in caplog.text
    assert "metrics.port" in caplog.text


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_a_warning(tmp_path: Path, caplog, host):
    configuration = Configuration(run="tiny", metrics=MetricsSettings(host=host))
    with serve_metrics(
        configuration, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}
    ):
        pass
    assert f"no metrics: {host}" in caplog.text


def test_a_folder_that_cannot_be_written_leaves_the_endpoint(tmp_path: Path, caplog):
    (tmp_path / "metrics").write_text("a file where the folder belongs")
    caplog.set_level(logging.INFO)
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}):
        url = caplog.text.partition("/healthz on ")[2].split()[0]
        assert get(f"{url}/healthz")[0] == 200
    assert "cannot be written" in caplog.text


def test_metrics_can_be_switched_off(tmp_path: Path):
    configuration = Configuration(run="tiny", metrics=MetricsSettings(enabled=False))
    with serve_metrics(
        configuration, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}
    ):
        assert not (tmp_path / "metrics").exists()


def test_the_endpoint_file_goes_with_its_process_but_not_a_successors(tmp_path: Path):
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}):
        assert endpoint_file(tmp_path, "p").exists()
    assert not endpoint_file(tmp_path, "p").exists()
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}):
        endpoint_file(tmp_path, "p").write_text('{"pid": 1}')
    assert endpoint_file(tmp_path, "p").exists()


def test_a_name_with_slashes_stays_in_the_folder(tmp_path: Path):
    with serve_metrics(
        PLAIN, tmp_path, "prompts", "../../p", ProcessMetrics(threading.Event()), {}
    ):
        assert [f.name for f in (tmp_path / "metrics" / "endpoints").iterdir()] == [
            "..%2F..%2Fp.json"
        ]


def test_health_follows_the_turns_of_the_loop(tmp_path: Path):
    now = [0.0]
    stop = threading.Event()
    watch = ProcessMetrics(stop, lambda: now[0])
    with serve_metrics(PLAIN, tmp_path, "train", "trainer", watch, {}):
        url = endpoint(tmp_path, "trainer")["url"]

        def health() -> tuple[int, str]:
            status, text = get(f"{url}/healthz")
            return status, json.loads(text)["state"]

        assert health() == (200, "starting")
        watch.offer(dict)
        assert health() == (200, "running")
        now[0] = PLAIN.metrics.stalled_s + 1
        assert health() == (503, "stalled")
        watch.stop.is_set()  # the loop iterated
        assert health() == (200, "running")
        watch.stop.set()
        assert stop.is_set()
        assert health() == (200, "stopping")


def test_other_paths_name_what_is_served(tmp_path: Path):
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}):
        status, text = get(endpoint(tmp_path, "p")["url"] + "/")
    assert (status, text) == (404, "served here: /healthz, /metrics\n")


def test_clients_that_send_nothing_or_rubbish_block_no_other(tmp_path: Path):
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}):
        at = endpoint(tmp_path, "p")
        address = (at["host"], at["port"])
        with socket.create_connection(address), socket.create_connection(address) as rude:
            rude.sendall(b"\x00\xff\r\n\r\n")
            assert get(f"{at['url']}/healthz")[0] == 200


def test_silent_connections_above_the_bound_give_their_places_to_new_ones(tmp_path: Path):
    with serve_metrics(PLAIN, tmp_path, "prompts", "p", ProcessMetrics(threading.Event()), {}):
        at = endpoint(tmp_path, "p")
        address = (at["host"], at["port"])
        silent = [socket.create_connection(address) for _ in range(REQUESTS_MAX)]
        silent.append(socket.create_connection(address))
        assert silent.pop(0).recv(64) == b""
        newest = silent[-1]
        newest.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 " in newest.makefile("rb").readline()
        for client in silent:
            client.close()


def test_a_process_is_given_its_port_by_the_environment(caplog):
    configuration = Configuration(metrics=MetricsSettings(port=9464))
    assert metrics_port(configuration, {}) == 9464
    assert metrics_port(configuration, {"ROLLSTREAM_METRICS_PORT": "9500"}) == 9500
    assert metrics_port(configuration, {"ROLLSTREAM_METRICS_PORT": "99999"}) == 9464
    assert "ROLLSTREAM_METRICS_PORT='99999' is not a port" in caplog.text


def test_a_loop_that_ends_by_another_event_turns_by_that_one():
    """As a rank that follows rank 0 and ends where rank 0 ended, whenever it is stopped itself."""
    now, asked, ended = [0.0], threading.Event(), threading.Event()
    watch = ProcessMetrics(asked, lambda: now[0])
    polled = watch.turn_by(ended)
    now[0] = 20.0
    assert watch.health(10.0).state == "stalled"
    assert not polled.is_set()
    assert watch.health(10.0).state == "starting"
    asked.set()
    assert watch.health(10.0).state == "stopping"
    assert not polled.is_set()
    ended.set()
    assert polled.is_set()


def test_a_refused_host_is_logged_once(tmp_path: Path, caplog):
    with serve_metrics(PLAIN, tmp_path, "train", "trainer", ProcessMetrics(threading.Event()), {}):
        url = endpoint(tmp_path, "trainer")["url"]
        for host in ("gpu1.example.com", "gpu1.example.com", "gpu2.example.com"):
            request = urllib.request.Request(f"{url}/metrics", headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request, timeout=WAIT_S)
    lines = [one.message for one in caplog.records if "is refused" in one.message]
    assert len(lines) == 2
    assert "'gpu1.example.com'" in lines[0]
    assert "ROLLSTREAM_ALLOWED_HOSTS" in lines[0]
