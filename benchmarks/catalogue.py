"""The catalogue: which NAME measures which case, in which file, with which goal; a test compares it
with the files. A `*` stands for a part that a run fills in (a role, a topic, a batch size).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

Goals = Mapping[str, str]
"""Case → goal, "" where none was set; "×" marks a ratio to the case's reference."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One NAME: its module with `cases(quick)`, and its cases by the file that measures them."""

    module: str
    files: Mapping[str, Goals]

    def lists(self, case: str) -> bool:
        """Returns whether a measured case is in the list."""
        return any(fnmatchcase(case, one) for goals in self.files.values() for one in goals)


BENCHMARKS: Mapping[str, Benchmark] = {
    "agents": Benchmark(
        "benchmarks.agents.agents",
        {
            "agents/http.py": {"agents_endpoint": "≥ 0.95 ×", "agents_latency_ms": "≤ 2 ms"},
            "agents/tokens.py": {"agents_drift": "0", "agents_trained_tokens": "≤ 1.05 ×"},
            "agents/kills.py": {"agents_kills": "0"},
            "agents/unchanged.py": {"agents_unchanged": "≥ 8"},
            "agents/escapes.py": {
                "agents_escapes": "0",
                "agents_escapes_unconfined": "all",
                "agents_sandbox_starts": "",
            },
            "agents/slots.py": {"agents_slots": "≥ 0.95"},
            "agents/redundancy.py": {"agents_redundancy": "≥ 3.4 ×", "agents_redundancy_*": ""},
        },
    ),
    "archive": Benchmark(
        "benchmarks.storage.archive",
        {
            "storage/archive.py": {
                "archive_write": "≥ 0.5 ×",
                "archive_stream": "≥ 1 ×",
                "archive_cost": "≤ 0.03",
            }
        },
    ),
    "asking": Benchmark(
        "benchmarks.analysis.asking",
        {
            "analysis/asking.py": {
                "query_overhead": "≤ 1.3 ×",
                "query_startup": "≤ 1.5 ×",
                "cli_help_s": "≤ 0.3 s",
            }
        },
    ),
    "audit": Benchmark(
        "benchmarks.analysis.audit",
        {
            "analysis/audit.py": {
                "audit_found": "≥ 0.95",
                "audit_false": "0",
                "audit_continued": "≤ 0.25 ×",
            }
        },
    ),
    "bus": Benchmark(
        "benchmarks.streams.bus",
        {
            "streams/bus.py": {
                "bus_write": "≥ 0.6 ×",
                "bus_read": "≥ 0.5 ×",
                "bus_write_8k": "≥ 0.8 ×",
                "bus_read_8k": "≥ 0.7 ×",
                "bus_jsonl_*": "",
            }
        },
    ),
    "chaos": Benchmark(
        "benchmarks.chaos.chaos",
        {
            "chaos/chaos.py": {
                "boundary_violations": "0",
                "seeded_violations": "0",
                "kind_violations": "0",
                "chaos_lost_*": "0",
                "chaos_twice_*": "0",
            }
        },
    ),
    "cloud": Benchmark(
        "benchmarks.pipeline.cloud",
        {
            "pipeline/cloud.py": {
                "cloud_form_cost": "≥ 0.8 ×",
                "cloud_cpu_*": "",
                "cloud_records_*": "",
            }
        },
    ),
    "delta": Benchmark(
        "benchmarks.weights.delta",
        {
            "weights/delta.py": {
                "delta_sparse": "≥ 0.95",
                "delta_dense": "≥ 0.93",
                "delta_encode": "≥ 1 GB/s",
                "delta_apply": "≥ 1 GB/s",
                "delta_real": "",
                "delta_real_quickstart": "",
            }
        },
    ),
    "edges": Benchmark(
        "benchmarks.edges.edges",
        {
            "edges/memory.py": {"edges_memory_mb": "≤ 1024 MB"},
            "edges/own.py": {"edges_own": "0"},
            "edges/files.py": {"edges_files": "0", "edges_files_*": ""},
            "edges/parsers.py": {"edges_parsers": "0"},
            "edges/deaths.py": {"edges_deaths": "0"},
        },
    ),
    "engine": Benchmark(
        "benchmarks.engine.engine",
        {
            "engine/engine.py": {
                "engine_equal": "≥ 1.65 ×",
                "engine_generic": "≥ 1 ×",
                "engine_longtail": "≥ 6 ×",
                "engine_longtail_*": "",
            }
        },
    ),
    "evidence": Benchmark(
        "benchmarks.evidence.evidence",
        {
            "evidence/evidence.py": {
                "evidence_recount": "0",
                "evidence_repeated": "0",
                "evidence_replayed": "0",
                "evidence_roles": "≥ 0.99",
                "lag8_difference": "≤ 0.02",
                "lag8_not_worse": "≥ -0.02",
                "stress_uncorrected": "≤ -0.2",
                "stress_default": "≥ -0.02",
                "paired_variance": "≤ 0.5",
                "ess_auroc": "≥ 0.9",
            }
        },
    ),
    "explorer": Benchmark(
        "benchmarks.explorer.explorer",
        {
            "explorer/explorer.py": {
                "explorer_assets_kb": "≤ 150 kB",
                "explorer_paint_s": "≤ 1 s",
                "explorer_open_s": "≤ 0.3 s",
                "explorer_view_s": "≤ 1 s",
                "explorer_memory_mb": "≤ 400 MB",
                "explorer_cost": "≥ 0.98 ×",
            },
            "explorer/large_run.py": {},
        },
    ),
    "first_hour": Benchmark(
        "benchmarks.first_hour.first_hour",
        {
            "first_hour/share.py": {"first_hour_cases": "1"},
            "first_hour/advice.py": {"advice_right": "1"},
            "first_hour/check.py": {
                "check_s": "≤ 5",
                "check_million_s": "≤ 5",
                "planted_row_named": "1",
            },
            "first_hour/refusals.py": {"false_refusals": "0"},
        },
    ),
    "hex": Benchmark(
        "benchmarks.repack.hex",
        {"repack/hex.py": {"hex_gain": "≥ 1.2 ×", "hex_gain_sim": "", "hex_plan_sim": ""}},
    ),
    "histospec": Benchmark(
        "benchmarks.histospec.histospec",
        {
            "histospec/histospec.py": {
                "draft_insert": "≥ 200,000 tokens/s",
                "draft_bytes_per_token": "≤ 400 B",
                "draft_lookup": "≤ 35 µs, or 1.1 × of a suffix tree's time",
                "histospec_control_*": "",
                "histospec_batch_1": "≥ 2.5 ×",
                "histospec_batch_8": "≥ 1.86 ×",
                "histospec_batch_*": "",
                "histospec_busy_batch_*": "",
                "histospec_busy_others_*": "",
                "histospec_old": "",
                "histospec_others_*": "",
                "histospec_accepted": "",
                "histospec_worst": "≥ 0.97",
            },
            "histospec/acceptance.py": {"draft_accept_vs_vllm": "≥ 1 ×"},
            "histospec/quickstart.py": {"histospec_quickstart": "≥ 0.97 ×"},
        },
    ),
    "hosts": Benchmark(
        "benchmarks.hosts.hosts",
        {
            "hosts/hosts.py": {
                "hosts_cut": "0",
                "hosts_cut_idle": "≤ 0.1",
                "hosts_back_s": "≤ 15 s",
                "hosts_egress": "≤ 1.05",
            }
        },
    ),
    "hostile": Benchmark(
        "benchmarks.chaos.hostile",
        {
            "chaos/hostile.py": {"hostile_deaths": "0", "hostile_accounted": "1"},
            "chaos/false_deaths.py": {"false_deaths": "0", "false_deaths_found": "1"},
        },
    ),
    "kafka": Benchmark(
        "benchmarks.streams.kafka",
        {
            "streams/kafka.py": {
                "kafka_produce": "≥ 0.9 ×",
                "kafka_consume": "≥ 0.9 ×",
                "kafka_produce_encode": "",
                "kafka_consume_decode": "",
                "kafka_stopped_growth_mb": "≤ its buffer",
            }
        },
    ),
    "learning": Benchmark(
        "benchmarks.learning.losses", {"learning/losses.py": {"loss_references": "≤ 1e-6"}}
    ),
    "lora": Benchmark(
        "benchmarks.weights.lora",
        {
            "weights/lora.py": {
                "lora_bytes": "≤ 1.05 ×",
                "lora_versions": "≥ 0.9 ×",
                "lora_drain": "0 ms",
                "lora_stale_hits": "0",
                "lora_difference": "≥ -0.02",
            }
        },
    ),
    "one_reading": Benchmark(
        "benchmarks.one_reading.one_reading",
        {
            "one_reading/claims_checked.py": {"claims_checked": "0"},
            "one_reading/folders.py": {"folders_read": "1"},
            "one_reading/resume_settings.py": {"resume_settings": "0"},
            "one_reading/templates.py": {
                "templates": "≥ 24 families",
                "templates_silently_wrong": "0",
            },
        },
    ),
    "oncall": Benchmark("benchmarks.oncall.alerts", {"oncall/alerts.py": {"alerts_raised": "≥ 1"}}),
    "pipeline": Benchmark(
        "benchmarks.pipeline.pipeline",
        {
            "pipeline/pipeline.py": {
                "pipeline_vs_plain_loop": "≥ 1.1 ×",
                "pipeline_async_speedup": "",
                "pipeline_busy": "≥ 0.85",
                "pipeline_accuracy_gap": "≤ 0.02",
                "time_to_75": "≤ a seventh of TRL's",
                "peak_memory_*": "",
            }
        },
    ),
    "planner": Benchmark(
        "benchmarks.repack.planner", {"repack/planner.py": {"planner_10000_ms": "≤ 100 ms"}}
    ),
    "relay": Benchmark(
        "benchmarks.weights.relay",
        {
            "weights/relay.py": {
                "relay_chain": "≤ 1.1 ×",
                "relay_publish": "≤ 1.2 ×",
                "relay_egress": "≤ 1 ×",
                "relay_chain_*": "",
            }
        },
    ),
    "repack": Benchmark(
        "benchmarks.repack.repack",
        {
            "repack/repack.py": {
                "repack_real": "≥ 1.26 ×",
                "slots_busy": "≥ 0.9",
                "repack_move_ms": "",
            },
            "repack/faults.py": {
                "kill_kept": "≥ 0.95",
                "kill_pause_steps": "≤ 1",
                "dispatch_gap_idle": "≤ 0.02",
            },
        },
    ),
    "repack_model": Benchmark(
        "benchmarks.repack.model",
        {
            "repack/model.py": {
                "repack_model": "≥ 1.15 ×",
                "placement_model": "≥ 1.1 ×",
                "all_on_model": "≥ 1.5 ×",
                "repack_model_both": "",
                "repack_model_drafts": "",
                "repack_model_in_flight": "",
            }
        },
    ),
    "resume": Benchmark(
        "benchmarks.resume.resume",
        {
            "resume/resume.py": {"resume_identical": "1", "recovery_time": "≤ 1.5 ×"},
            "resume/promise_reads.py": {
                "audit_read": "≥ 0.5 ×",
                "audit_read_8k": "≥ 0.5 ×",
                "replay_read": "≥ 0.5 ×",
                "replay_read_8k": "≥ 0.5 ×",
            },
            "resume/promise_partials.py": {"partials_amplification": "≤ 1.5"},
            "resume/promise_cost.py": {"promise_cost": "≤ 0.05"},
        },
    ),
    "s3": Benchmark(
        "benchmarks.storage.s3",
        {"storage/s3.py": {"s3_put": "≥ 0.9 ×", "s3_get": "≥ 0.9 ×"}},
    ),
    "simulator": Benchmark(
        "benchmarks.simulator.simulator",
        {
            "simulator/simulator.py": {
                "sim_laminar_sync_error": "",
                "sim_laminar_one_step_error": "",
                "sim_laminar_partial_error": "",
                "sim_published_order": "1",
                "sim_repack_throughput_error": "",
                "sim_repack_kv_error": "",
                "sim_rhymerl_histopipe_error": "",
                "sim_areal_error": "",
                "sim_cluster_s": "≤ 60 s",
            },
            "simulator/ours.py": {
                "sim_ours_over_laminar": "≥ 1.3",
                "sim_ours_over_laminar_worst": "≥ 1.1",
                "sim_ours_over_laminar_published": "",
                "sim_ours_over_laminar_published_worst": "",
                "sim_ours_over_laminar_plain": "",
                "sim_ours_over_laminar_plain_worst": "",
            },
            "simulator/examples.py": {"sim_examples_over_laminar": "≥ 1"},
            "simulator/real.py": {"sim_vs_real_error": "≤ 0.1"},
        },
    ),
    "sizes": Benchmark(
        "benchmarks.sizes.sizes",
        {
            "sizes/plan_error.py": {"plan_error": "≤ 0.1"},
            "sizes/rank_memory.py": {"rank_memory": "≤ 1.15 ×"},
            "sizes/rollout_memory.py": {"rollout_memory": "≤ 256 MB"},
        },
    ),
    "soak": Benchmark(
        "benchmarks.soak.soak",
        {
            "soak/soak.py": {
                "soak_memory": "≤ 1.1",
                "soak_files": "≤ 1.1",
                "soak_disk": "≤ 1 ×",
                "soak_minutes": "≤ 25 min",
            }
        },
    ),
    "skew": Benchmark("benchmarks.upgrade.skew", {"upgrade/skew.py": {"upgrade_skew": "0"}}),
    "stack": Benchmark(
        "benchmarks.stack.stack",
        {
            "stack/stack.py": {"stack_up_s": "≤ 120 s", "stack_idle_cpu": "≤ 0.02"},
            "stack/kills.py": {"stack_kills": "0"},
            "stack/form_cost.py": {"stack_form_cost": "≥ 0.95 ×"},
        },
    ),
    "tune": Benchmark("benchmarks.tune.tune", {"tune/tune.py": {"tune_regret": "≤ 0.05"}}),
    "two_pages": Benchmark(
        "benchmarks.two_pages.two_pages", {"two_pages/two_pages.py": {"two_pages": "0"}}
    ),
    "weights": Benchmark(
        "benchmarks.weights.weights",
        {
            "weights/weights.py": {
                "publish_to_applied_delta": "≤ 1.3 ×",
                "publish_to_applied_full": "≤ 1.3 ×",
                "publish_to_applied_slow_link": "≥ 10 ×",
            },
            "weights/step.py": {
                "publish_stall": "≤ 1.2 ×",
                "hash_stall": "≤ 1.02 ×",
                "inflight_gap": "≤ 1 ×",
            },
        },
    ),
    "vllm": Benchmark(
        "benchmarks.vllm.vllm",
        {
            "vllm/exact.py": {"vllm_logprob_error": "≤ 0.0001"},
            "vllm/overhead.py": {"vllm_overhead": "≥ 0.95 ×"},
            "vllm/pause.py": {"vllm_update_pause*": "≤ 1.3 ×", "vllm_updates_lost": "0"},
            "vllm/drafts.py": {
                "vllm_drafts_batch_1": "",
                "vllm_drafts_batch_8": "",
                "vllm_drafts_worst": "≥ 0.97 ×",
            },
        },
    ),
}
BY_NAME_ONLY = ("hosts", "stack", "vllm")
"""They need network namespaces, a Docker daemon, and `make vllm`."""


def lines() -> Iterator[str]:
    """Returns the list as text, one case a line."""
    pattern = "{:<30} {:<10} {:<38} {}"
    yield pattern.format("case", "NAME", "file", "goal")
    for name, benchmark in BENCHMARKS.items():
        for file, goals in benchmark.files.items():
            for case, goal in goals.items():
                yield pattern.format(case, name, f"benchmarks/{file}", goal).rstrip()
