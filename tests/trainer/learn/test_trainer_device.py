"""`trainer.device`: available devices, refused ones; a batch moves as a whole.
`trainer.cpu_offload` changes no bit. CUDA is not run.
"""

from dataclasses import fields

import pytest
import torch
from pydantic import ValidationError

from rollstream.consumers.trainer.learn.forward import device_of
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, to_device, token_rows
from rollstream.errors import ConfigurationError
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import build, settings


def test_a_device_that_is_not_there_is_refused():
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="must be a device of this machine, got 'cuda:99'"):
        device_of("cuda:99")
    for name in ("gpu", "cuda:", "cuda:-1", "meta", "CPU"):
        with pytest.raises(ValidationError):
            settings(device=name)


def test_auto_is_what_the_machine_has():
    assert device_of("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_every_tensor_of_a_batch_moves(samples):
    for batch in (token_rows(samples), loss_inputs(samples, version=9)):
        moved = to_device(batch, torch.device("meta"))  # pyright: ignore[reportArgumentType]
        for field in fields(batch):
            before, after = getattr(batch, field.name), getattr(moved, field.name)
            if isinstance(before, torch.Tensor):
                assert after.device.type == "meta"
            else:
                assert after == before


def test_masters_and_moments_are_on_the_device_and_copies_in_host_memory():
    learner = TorchLearner(build(), settings(device="auto"))
    (metrics,) = train(learner, stream(1))
    learner.close()
    assert metrics["updates_skipped"] == 0
    assert learner.flat.device.type == device_of("auto").type
    for tensors in (learner.snapshot("bfloat16"), learner.state()):
        assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_tied", "gpt2"])
def test_an_offloaded_state_is_the_same_bits_and_apart_from_what_computes(name, compute):
    states = []
    for offload in (False, True):
        model = build(name)
        model._keep_in_fp32_modules_strict = {"norm", "ln_f"}  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        learner = TorchLearner(model, settings(compute=compute, cpu_offload=offload))
        train(learner, stream(3))
        learner.close()
        states.append(learner.state())
        place = learner.flat.untyped_storage().data_ptr()
        shares = {one.untyped_storage().data_ptr() == place for one in model.parameters()}
        assert shares == {False} if offload else True in shares
    assert all(torch.equal(states[0][one], states[1][one]) for one in states[0])


def test_an_offloaded_learner_continues_from_a_state_of_either_kind():
    updates = stream(4)
    whole = TorchLearner(build(), settings())
    train(whole, updates)
    for first, second in ((False, True), (True, False)):
        before = TorchLearner(build(), settings(cpu_offload=first))
        train(before, updates[:2])
        after = TorchLearner(build(), settings(cpu_offload=second))
        after.load_state(before.state())
        train(after, updates[2:])
        assert after.state_hash() == whole.state_hash()
        for learner in (before, after):
            learner.close()
    whole.close()
