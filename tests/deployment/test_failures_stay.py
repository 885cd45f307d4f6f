"""What a server gets to know of a client's failure: its kind, and nothing of its text, which may name a patient."""

import logging

import pytest
import torch
from helpers import TensorData
from helpers.deployed import Deployment, federation, method_of, of_client, reason_of
from helpers.methods import METHODS, data

from fedmoe_pl.checkpoints.configuration import configuration
from fedmoe_pl.checkpoints.files import DamagedFileError
from fedmoe_pl.deployment import BadMessageError, Message, Participant
from fedmoe_pl.deployment.schema import FAILURES

METHOD = METHODS["FedPer"]
CLIENT = 1
SECRET = "/data/patients/mueller.dcm"
HANDLERS = ("describe", "prepare", "begin", "train", "evaluate", "read", "exchange", "finish")


class BadMueller(ValueError):
    """A user's own exception, whose name may say something, too."""


def error_with_notes():
    error = BadMueller(SECRET)
    error.__cause__ = OSError(2, "no such file", SECRET)
    return error


EXCEPTIONS = {
    "ValueError": error_with_notes,
    "FileNotFoundError": lambda: FileNotFoundError(2, "no such file", SECRET),
    "KeyError": lambda: KeyError(SECRET),
    "file": lambda: DamagedFileError(f"'{SECRET}' is damaged"),
    "refused": lambda: BadMessageError(SECRET),
}


@pytest.fixture(scope="module")
def conversation(tmp_path_factory):
    """A client that was deployed, and a message of each kind that it got."""
    deployed = Deployment(method_of("FedMoEDA", evaluate=True), tmp_path_factory.mktemp("conversation"))
    deployed.run()
    return deployed.participants[CLIENT], {each.kind: each for client, each in deployed.heard if client == CLIENT}


@pytest.mark.parametrize("kind", HANDLERS)
def test_no_text_of_an_exception_leaves_the_client(kind, conversation, monkeypatch):
    client, messages = conversation
    for failure, make in EXCEPTIONS.items():

        def fail(message, make=make):
            raise make()

        monkeypatch.setattr(client, f"_{kind}", fail)
        answer = client.answer(messages[kind])
        assert answer.values == {"failure": failure} and not answer.tensors
        assert not any(word in answer.to_bytes() for word in (b"mueller", b"Mueller", b"patients", b"/data"))
        assert SECRET in reason_of(client, messages[kind])


def test_a_training_that_fails_is_told_by_its_kind_and_in_the_clients_own_log_as_it_is(tmp_path, caplog):
    def fail(*args):
        raise error_with_notes()

    deployed = Deployment(METHOD, tmp_path)
    deployed.participants[CLIENT].model.training_step = fail
    with pytest.warns(UserWarning) as warned, caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        deployed.run()
    texts = [str(each.message) for each in warned]
    assert any(f"client {CLIENT} is left out: it raised a ValueError; its own log says more" in text for text in texts)
    assert f"join: this client has failed: BadMueller: {SECRET}." in caplog.messages
    assert not any("ueller" in text for text in texts)
    assert not any(b"ueller" in answer.to_bytes() for answer in deployed.answers)


class Scans(TensorData):
    """A user's own data module."""

    def __init__(self, *args, patients=SECRET, **kwargs):
        super().__init__(*args, **kwargs)
        self.patients = patients


def test_settings_of_a_clients_data_stay_with_it(tmp_path):
    """Nobody compares them."""
    arrays, settings = of_client(data(), 0).arrays, federation(METHOD.phases(), tmp_path)
    own = Scans(arrays.x_train, arrays.y_train, [], (arrays.x_test, arrays.y_test), torch.float64, batch_size=4)
    client = Participant(settings, METHOD.model(), own, 0, tmp_path)
    assert SECRET in str(configuration(settings, client.model, client.datamodule))
    answer = client.answer(Message("describe"))
    assert answer.kind == "description" and SECRET.encode() not in answer.to_bytes()
    assert all(phase.name in answer.values["configuration"]["objects"] for phase in METHOD.phases())


def test_every_kind_of_failure_is_a_sentence():
    assert {"ValueError", "MemoryError", "refused", "configuration"} <= FAILURES.keys()
    assert all(sentence and "\n" not in sentence for sentence in FAILURES.values())
