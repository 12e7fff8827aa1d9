"""LoRA in the torch engine: one version in flight, or several side by side in one batch."""

from dataclasses import replace

import pytest
import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.streams.values import Sampling, Version
from tests.support.adapted_models import adapted, adapter_update, merged, with_fault
from tests.support.engine_samples import (
    ask,
    chosen_logprobs,
    gather,
    half_way,
    open_torch,
    prompt,
    run_all,
    tiny_model,
    to_the_end,
)

VERSIONS = [Version(number, 1) for number in range(1, 6)]
GREEDY = Sampling(temperature=0, tokens_max=24)


def named(name, version, sampling=GREEDY, length=6, seed=0):
    return replace(ask(name, prompt(length, seed), sampling), version=version)


def opened(family="qwen3", slots=4):
    """The engine over the base, and by version the same weights as one plain model."""
    plain = tiny_model(family)
    models = {v: adapted(plain, seed=v.number) for v in VERSIONS}
    engine = TorchEngine(plain.config, plain.state_dict(), Version(0, 0), EngineOptions(slots, 96))
    return engine, models, {v: merged(model, plain) for v, model in models.items()}


def loaded(versions):
    """What an engine serves once these are loaded, and all adapted models."""
    engine, models, _ = opened()
    served = engine._batch.decoder.adapters
    assert served is not None
    for version in versions:
        served.load(adapter_update(version, models[version]))
    return served, models


def check(gained, start, wanted):
    logprobs = chosen_logprobs(wanted, start, gained.tokens)
    torch.testing.assert_close(torch.tensor(gained.logprobs), logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama3_rope"])
def test_an_adapter_gives_the_log_probabilities_of_the_merged_model(family):
    engine, models, whole = opened(family)
    engine.update(adapter_update(VERSIONS[0], models[VERSIONS[0]]), "in_flight")
    gained = run_all(engine, [ask(f"t{i}", prompt(3 + i, i), GREEDY) for i in range(6)])
    for i in range(6):
        check(gained[f"t{i}"], prompt(3 + i, i), whole[VERSIONS[0]])


def test_in_flight_changes_the_adapter_of_all_rows_and_stamps_spans():
    engine, models, _ = opened()
    first, second = VERSIONS[:2]
    engine.update(adapter_update(first, models[first]), "in_flight")
    gained = half_way(engine)
    engine.update(adapter_update(second, models[second]), "in_flight")
    assert to_the_end(engine, gained).spans == [(first, 12), (second, 28)]
    assert engine.versions == [second]


def test_recompute_equals_a_prefill_under_the_new_adapter():
    engine, models, whole = opened()
    first, second = VERSIONS[:2]
    engine.update(adapter_update(first, models[first]), "in_flight")
    gained = half_way(engine)
    engine.update(adapter_update(second, models[second]), "in_flight_recompute")
    mine = to_the_end(engine, gained)
    wanted = chosen_logprobs(whole[second], prompt(6), mine.tokens)
    torch.testing.assert_close(torch.tensor(mine.logprobs[12:]), wanted[12:], atol=1e-4, rtol=0)


def test_several_versions_side_by_side_are_those_of_their_merged_models():
    """Also from equal prompts: the prefix cache is keyed by version."""
    engine, models, whole = opened(slots=4)
    requests = []
    for version in VERSIONS:
        engine.update(adapter_update(version, models[version]), "keep_version")
        for i in range(2):
            request = named(f"{version}-{i}", version, length=6, seed=i)
            engine.submit(request)
            requests.append(request)
    assert engine.versions == VERSIONS
    gained = run_all(engine)
    for request in requests:
        mine = gained[request.trajectory]
        assert mine.spans == [(request.version, 24)]
        check(mine, request.tokens, whole[request.version])


@pytest.mark.parametrize(
    ("rows", "is_stacked"),
    [("01230123", True), ("3210012", True), ("0000000000001", True), ("000000000000123", False)],
)
def test_every_row_gets_the_products_of_its_own_version(rows, is_stacked):
    """As one batched product where little is padded, else version by version."""
    served, _ = loaded(VERSIONS)
    versions = [VERSIONS[int(digit)] for digit in rows]
    routes = served.routes(versions, 2)
    assert routes is not None
    assert (routes.stack is not None) == is_stacked
    for product in range(4):
        factors = [served.loaded[v].layers[0][product] for v in versions for _ in range(2)]
        factors = [one for one in factors if one is not None]
        x = torch.randn(2 * len(rows), factors[0].low.shape[0])
        out = torch.randn(2 * len(rows), factors[0].high.shape[1])
        wanted = [o + r @ f.low @ f.high for o, r, f in zip(out, x, factors, strict=True)]
        routes.add(out, x, 0, product)
        torch.testing.assert_close(out, torch.stack(wanted))


def test_stacked_factors_are_those_of_the_adapters_that_are_served_now():
    served, models = loaded(VERSIONS[:2])

    def stack(versions):
        routes = served.routes(versions)
        return None if routes is None else routes.stack

    first = stack(VERSIONS[:2])
    assert first is not None
    assert stack([*VERSIONS[:2], *VERSIONS[:2]]) is first
    served.load(adapter_update(VERSIONS[1], models[VERSIONS[2]]))
    second, mine = stack(VERSIONS[:2]), served.loaded[VERSIONS[1]].layers[0][0]
    assert second is not None
    assert second is not first
    stacked = second[0][0]
    assert stacked is not None
    assert mine is not None
    assert torch.equal(stacked.high[1], mine.high)
    served.keep([VERSIONS[1]])
    assert stack(VERSIONS[1:2]) is None


def test_an_adapter_leaves_with_the_last_sequence_that_names_it():
    engine, models, _ = opened()
    first, second, third = VERSIONS[:3]
    engine.update(adapter_update(first, models[first]), "keep_version")
    engine.submit(named("a", first, Sampling(temperature=0, tokens_max=8)))
    engine.submit(named("b", first, Sampling(temperature=0, tokens_max=30)))
    for version in (second, third):
        engine.update(adapter_update(version, models[version]), "keep_version")
    assert engine.versions == [first, third], "no sequence names the second"
    gained = {}
    while "a" not in gained or gained["a"].finish is None:
        gather(gained, engine.poll(10.0))
    assert engine.versions == [first, third]
    run_all(engine)
    assert engine.versions == [third]
    with pytest.raises(EngineRefused, match="is not here"):
        engine.submit(named("c", first))


def test_an_older_version_from_history_is_served_beside_the_newest():
    engine, models, whole = opened()
    first, second = VERSIONS[:2]
    engine.update(adapter_update(second, models[second]), "keep_version")
    engine.submit(named("new", second))
    engine.update(adapter_update(first, models[first]), "keep_version")
    assert engine.version == second
    engine.submit(named("old", first))
    gained = run_all(engine)
    for name, version in (("new", second), ("old", first)):
        check(gained[name], prompt(6), whole[version])


def test_served_adapters_are_compared_with_what_was_given():
    engine, models, _ = opened()
    update = adapter_update(VERSIONS[0], models[VERSIONS[0]])
    engine.update(engine.prepare(update), "in_flight")
    assert engine.read_back(update.tensors, update.tensors).differing == ()
    other = {name: tensor + 1 for name, tensor in update.tensors.items()}
    compared = engine.read_back(other, other)
    assert len(compared.differing) == compared.count == len(other)


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown", "nan"])
def test_a_wrong_adapter_is_refused_and_the_others_are_served_on(fault):
    engine, models, _ = opened()
    first, second = VERSIONS[:2]
    engine.update(adapter_update(first, models[first]), "keep_version")
    engine.submit(named("t", first))
    unknown = "base_model.model.lm_head.lora_A.weight"
    bad = with_fault(adapter_update(second, models[second]), fault, unknown)
    with pytest.raises(EngineRefused, match=r"up_proj|lm_head"):
        engine.update(bad, "keep_version")
    assert run_all(engine)["t"].spans == [(first, 24)]


def test_other_decoders_refuse_adapters():
    model = tiny_model("gpt2")
    engine, (version, *_) = open_torch(model), VERSIONS
    own = adapted(tiny_model("qwen3"), seed=1)
    with pytest.raises(EngineRefused, match="Llama- and Qwen-family"):
        engine.update(adapter_update(version, own), "in_flight")
    assert engine.versions == [engine.version]
