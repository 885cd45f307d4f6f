"""What clients say of themselves before the first round, and whether a client that comes back is still the same."""

import logging
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import GivenParts
from helpers.deployed import Changing, Passing, deploy, federation, killed, participant, participants, with_values
from helpers.methods import METHODS, data
from helpers.runs import assert_same
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, Dataset, Subset

from fedmoe_pl import Train
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.data import CsvFile, FromDatasets
from fedmoe_pl.deployment import Message, Participant, descriptions, serve
from fedmoe_pl.deployment.descriptions import own_data, read_descriptions
from fedmoe_pl.deployment.schema import FAILURES, problem_of_values
from fedmoe_pl.setup.data import TooManyClassesError

METHOD = replace(METHODS["FedPer"], phases=lambda: [replace(METHODS["FedPer"].phases()[0], rounds=4)])
OF_TRAINER = {"backend": TrainerBackend()}
CLIENT = 1


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch):
    monkeypatch.setattr(descriptions, "_SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(descriptions, "_BACK_WITHIN", 0)


def transport_with(tmp_path, change, kind="describe", most=None):
    transport = Passing(participants(METHOD, data(), tmp_path, **OF_TRAINER))
    transport.participants[CLIENT] = Changing(transport.participants[CLIENT], kind, change, most)
    return transport


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_values(sizes=[10**12, 0, 0]), "its sizes is"),
        (with_values(shape=[10**6, 10**6]), "its shape is"),
        (with_values(dtype="load"), "its dtype is 'load'"),
        (with_values(classes=["a" * 1001]), "its classes is"),
        (with_values(normalization=[[0.0]]), r"its normalization is \[\[0\.0\]\]"),
        (with_values(configuration={"hparams": "{"}), "its configuration cannot be read"),
        (
            lambda answer: Message("failed", {"failure": "MemoryError"}),
            "it raised a MemoryError; its own log says more",
        ),
    ],
)
def test_a_description_that_is_none_is_waited_for(change, reason, tmp_path):
    transport = transport_with(tmp_path, change, most=2)
    with pytest.warns(UserWarning, match=f"client {CLIENT} cannot take part: {reason}") as warned:
        deployed = deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    assert len(warned) == 1 and not deployed.run.states["FedPer"].failed


def test_a_client_that_the_server_does_not_have_leaves_and_says_why(tmp_path):
    client = participant(METHOD, data(), tmp_path, 3, **OF_TRAINER)
    assert client.answer(Message("describe", {"num_clients": 4})).kind == "description" and not client.leaves
    assert client.answer(Message("describe", {"num_clients": 3})).kind == "leaves"
    assert client.leaves == "client is 3, but must be at most 2, because the server counts from 0"


def test_a_client_with_other_settings_is_told_so_and_waited_for(tmp_path):
    other = replace(METHOD, phases=lambda: [replace(METHOD.phases()[0], rounds=7, train=Train(batch_size=2))])
    clients = participants(METHOD, data(), tmp_path, **OF_TRAINER)
    differs = participant(other, data(), tmp_path, CLIENT, **{**OF_TRAINER, "seed": 5})
    transport = Passing({**clients, CLIENT: differs})
    notes = []

    def start_again_with_the_right_ones(client, message):
        if message.kind == "note":
            notes.append((client, message.values["text"]))
            transport.participants[CLIENT] = clients[CLIENT]

    transport.before = start_again_with_the_right_ones
    texts = [
        "seed is 5, but must be 0",
        "phases.FedPer.rounds is 7, but must be 4",
        "phases.FedPer.train.batch_size is 2, but must be null",
    ]
    reason = f"client {CLIENT} cannot take part: {'; '.join(texts)}, as on the server"
    with pytest.warns(UserWarning, match=reason):
        deployed = deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    ((client, text),) = notes
    assert client == CLIENT and text.startswith(f"{reason}; end this command with Ctrl-C")
    assert not deployed.run.states["FedPer"].failed


def test_a_server_that_continues_does_not_wait_for_clients_that_it_knows(tmp_path):
    transport = killed(METHOD, data(), tmp_path, 20, **OF_TRAINER)
    del transport.participants[CLIENT]
    with pytest.warns(UserWarning) as warned:
        deployed = deploy(METHOD, data(), tmp_path, transport, "last", **OF_TRAINER)
    assert all(f"client {CLIENT} " in str(warning.message) for warning in warned)
    assert deployed.run.states["FedPer"].round == 4


def test_a_server_that_is_to_continue_a_run_begins_one_if_there_is_none(tmp_path):
    with pytest.warns(UserWarning, match=r"no run in .* has a checkpoint\. A new run begins"):
        deployed = deploy(METHOD, data(), tmp_path, None, "last", **OF_TRAINER)
    assert deployed.run.states["FedPer"].round == 4


def test_a_client_that_is_known_to_have_the_result_may_be_away_when_the_server_starts_again(tmp_path):
    transport = Passing(participants(METHOD, data(), tmp_path, **OF_TRAINER))
    deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    del transport.participants[CLIENT]
    before = len(transport.passed)
    deploy(METHOD, data(), tmp_path, transport, "last", **OF_TRAINER)  # without a warning
    assert {message.kind for _, message in transport.passed[before:]} == {"describe", "finish"}


def test_a_server_that_continues_waits_until_enough_clients_are_there(tmp_path):
    transport = killed(METHOD, data(), tmp_path, 20, **OF_TRAINER)
    everybody, transport.participants, looks = transport.participants, {}, []

    def come_late(client, message):
        looks.append(client)
        if len(looks) == 15:  # at the third look
            transport.participants = everybody

    transport.before = come_late
    deployed = deploy(METHOD, data(), tmp_path, transport, "last", **OF_TRAINER)
    assert not deployed.run.states["FedPer"].failed


def test_a_server_that_continues_waits_for_all_if_it_cannot_read_what_it_knew(tmp_path):
    transport = killed(METHOD, data(), tmp_path, 20, **OF_TRAINER)
    (path,) = tmp_path.glob("server/**/descriptions.json")
    path.write_text("{")
    before = len(transport.heard)
    deployed = deploy(METHOD, data(), tmp_path, transport, "last", **OF_TRAINER)
    assert [message.kind for _, message in transport.heard[before:]].count("describe") == 5
    assert not deployed.run.states["FedPer"].failed


def test_a_client_that_comes_back_with_other_data_or_settings_is_left_out(tmp_path, caplog):
    transport = killed(METHOD, data(), tmp_path, 20, **OF_TRAINER)
    transport.participants[0] = participant(METHOD, data(validation_fraction=0.3), tmp_path, 0, **OF_TRAINER)
    other = replace(METHOD, phases=lambda: [replace(METHOD.phases()[0], rounds=9, train=Train(batch_size=2))])
    transport.participants[3] = participant(other, data(), tmp_path, 3, **{**OF_TRAINER, "seed": 7})
    with pytest.warns(UserWarning) as warned, caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        deploy(METHOD, data(), tmp_path, transport, "last", **OF_TRAINER)
    texts = {str(warning.message) for warning in warned}
    sizes = "numbers of training, validation and test samples [9, 4, 0] in place of [13, 0, 0]"
    settings = (
        "rounds is 9, but must be 4; phases.FedPer.train.batch_size is 2, but must be null, as when the run began"
    )
    for client, own in ((0, f"its data have changed since the run began: {sizes}"), (3, settings)):
        reason = f"{FAILURES['configuration']}; its own log says more"
        assert f"Phase 'FedPer': client {client} has not confirmed that it has the result: {reason}" in texts, texts
        assert any(own in text for text in caplog.messages) and not any(own in text for text in texts)
    assert "this client has failed: seed is 7, but must be 0; " in caplog.text


def test_a_configuration_that_does_not_fit_a_client_ends_the_server_before_any_training(tmp_path):
    def refuse(*args):
        raise MisconfigurationException("FedPer: start is missing.")

    transport = Passing(participants(METHOD, data(), tmp_path, **OF_TRAINER))
    for each in transport.participants.values():
        each.federation.run_of_client = refuse
    with pytest.raises(MisconfigurationException, match=r"^client \d: its configuration, data or files do not fit"):
        deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    assert "update" not in {message.kind for _, message in transport.heard}
    assert not [*tmp_path.glob("client*/**/*.safetensors")]


def test_one_client_alone_cannot_end_the_server(tmp_path):
    everybody = replace(METHOD, phases=lambda: [replace(METHOD.phases()[0], clients_per_round=1.0)])
    transport = Passing(participants(everybody, data(), tmp_path, **OF_TRAINER))
    refusal = Message("failed", {"failure": "configuration"})
    transport.participants[CLIENT] = Changing(transport.participants[CLIENT], "train", lambda _: refusal)
    with pytest.warns(UserWarning) as warned:
        deployed = deploy(everybody, data(), tmp_path, transport, **OF_TRAINER)
    assert (
        str(warned[0].message)
        == f"Phase 'FedPer', round 1: client {CLIENT} is left out: {FAILURES['configuration']}; its own log says more"
    )
    assert deployed.run.states["FedPer"].round == 4


class Lazy(Dataset):
    """Samples that are read one by one."""

    def __init__(self, x, y, as_dicts=False):
        self.x, self.targets, self.as_dicts = x, y, as_dicts

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        pair = self.x[index], int(self.targets[index])
        return {"x": pair[0], "y": pair[1]} if self.as_dicts else pair


def lazy(partitioner=None, as_dicts=False, samples=None):
    arrays = data().arrays
    x, y = arrays.x_train.double(), arrays.y_train
    chosen = torch.arange(len(y)) if samples is None else samples
    train, test = Lazy(x[chosen], y[chosen], as_dicts), Lazy(arrays.x_test.double(), arrays.y_test, as_dicts)
    return FromDatasets(train, test, partitioner=partitioner, test_fraction=0.2)


def test_samples_that_are_read_one_by_one(tmp_path):
    parts, phases = data().partitioner.parts, METHOD.phases
    simulation = federation(phases(), tmp_path / "simulation", **OF_TRAINER)
    simulation.fit(METHOD.model(), lazy(GivenParts(parts)))
    clients = {
        client: Participant(
            federation(phases(), tmp_path, **OF_TRAINER),
            METHOD.model(),
            lazy(samples=part),
            client,
            tmp_path / f"{client}",
        )
        for client, part in enumerate(parts)
    }
    server = federation(phases(), tmp_path / "server", **OF_TRAINER)
    serve(server, METHOD.model(), lazy(), Passing(clients), len(parts))
    assert_same(server.run.states["FedPer"].server, simulation.run.states["FedPer"].server)


class OfHuggingFace(Dataset):
    """Pairs from a dataset of Hugging Face, whose column of classes has names."""

    def __init__(self, samples):
        datasets = pytest.importorskip("datasets")
        classes = datasets.ClassLabel(names=[*samples.class_to_idx, *"xyz"[len(samples.class_to_idx) :]])
        columns = {"x": samples.x.numpy(), "y": samples.targets.tolist()}
        self.dataset = datasets.Dataset.from_dict(columns).cast_column("y", classes).with_format("torch")

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]["x"].double(), int(self.dataset[index]["y"])


def two_parts(samples):
    return ConcatDataset([Subset(samples, range(2)), Subset(samples, range(2, len(samples)))])


KINDS = {"folder": lambda samples: samples, "parts": two_parts, "Hugging Face": OfHuggingFace}


def in_folders(path, *folders, kind="folder", targets=None):
    """Clients with folders of these names, which torchvision's ImageFolder numbers in their order."""
    clients = {}
    for client, (part, names) in enumerate(zip(data().partitioner.parts, folders, strict=True)):
        samples = lazy(samples=part)
        samples.train_dataset.class_to_idx = {name: np.int64(number) for number, name in enumerate(names)}
        samples.train_dataset = KINDS[kind if names else "folder"](samples.train_dataset)
        samples.targets = targets
        of_client = federation(METHOD.phases(), path, **OF_TRAINER)
        clients[client] = Participant(of_client, METHOD.model(), samples, client, path / f"{client}")
    return Passing(clients)


@pytest.mark.parametrize(
    ("folders", "difference"), [(("abc", "bca"), "'b' is 0, not 1"), (("ab", "c"), "'c' and 'a' are both 0")]
)
@pytest.mark.parametrize(
    ("kind", "targets"), [*((kind, None) for kind in KINDS), ("folder", lambda dataset: [y for _, y in dataset])]
)
def test_folders_that_number_a_class_differently_are_refused_together(kind, targets, folders, difference, tmp_path):
    transport = in_folders(tmp_path, folders[0], "", folders[1], "", "", kind=kind, targets=targets)
    refused = f"^client 2 must number its classes as the clients before it do, but {difference}; renumber them, such as"
    with pytest.raises(MisconfigurationException, match=refused):
        serve(federation(METHOD.phases(), tmp_path / "server"), METHOD.model(), lazy(), transport, 5)


def test_a_client_may_lack_classes_and_their_names_may_have_joiners(tmp_path):
    """Persian words have them within."""
    classes = "a", "b", "\u0645\u06cc\u200c\u0634\u0648\u062f"
    server = federation(METHOD.phases(), tmp_path / "server", **OF_TRAINER)
    serve(server, METHOD.model(), lazy(), in_folders(tmp_path, classes[:2], classes, *[()] * 3), 5)
    assert read_descriptions(server.run_dir)[1]["class_numbers"] == {"a": 0, "b": 1, classes[2]: 2}


def test_a_client_with_more_classes_than_the_model_is_named(tmp_path):
    evaluated = replace(METHOD, phases=lambda: [replace(METHOD.phases()[0], evaluate=True)])
    transport = Passing(participants(evaluated, data(), tmp_path, **OF_TRAINER))
    transport.participants[CLIENT] = Changing(transport.participants[CLIENT], "describe", with_values(num_classes=7))
    with pytest.raises(TooManyClassesError) as error:
        deploy(evaluated, data(), tmp_path, transport, **OF_TRAINER)
    assert error.value.because.endswith(f"; only client {CLIENT} has that many classes")


def test_data_with_other_shapes_are_refused_together(tmp_path):
    of_one = with_values(shape=[3])
    with pytest.raises(MisconfigurationException, match=rf"^client {CLIENT}: the shape of its samples is \[3\], but"):
        deploy(METHOD, data(), tmp_path, transport_with(tmp_path, of_one), **OF_TRAINER)


class OwnTable(CsvFile):
    """Passes what it does not know on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.parametrize("names", ["classes", "columns"])
def test_other_names_of_classes_or_columns_are_refused_together(names, tmp_path):
    of_one = with_values(**{names: ["height"]})
    refused = rf"^client {CLIENT}: the {names} of its samples are \['height'\], but must be None, as client 0's\."
    with pytest.raises(MisconfigurationException, match=refused):
        deploy(METHOD, data(), tmp_path, transport_with(tmp_path, of_one), **OF_TRAINER)


def test_many_names_of_classes_are_cut_in_the_refusal(tmp_path):
    of_one = with_values(classes=["height"] * 1000)
    with pytest.raises(MisconfigurationException) as error:
        deploy(METHOD, data(), tmp_path, transport_with(tmp_path, of_one), **OF_TRAINER)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("name", "problem"), [("poids\u00a0(kg)", ""), ("\u4f53\u91cd\u3000kg", ""), ("a\nb", "its columns")]
)
def test_names_of_columns_may_have_spaces_of_other_kinds(name, problem, tmp_path):
    """Such as those before a unit in a table of Excel."""
    answer = participant(METHOD, data(), tmp_path, 0, **OF_TRAINER).answer(Message("describe", {"num_clients": 3}))
    found = problem_of_values("description", {**answer.values, "columns": [name]})
    assert found.partition(" is")[0] == problem


def test_a_client_says_how_the_classes_and_columns_of_its_table_are_called(tmp_path):
    (tmp_path / "a.csv").write_text("weight,y,height\n1,no,3\n2,yes,4\n")
    table = CsvFile(str(tmp_path), "y", classes=["no", "yes"], test_fraction=0.5)
    of_client = own_data(table, 0, federation(METHOD.phases(), tmp_path))
    description = descriptions.described(federation(METHOD.phases(), tmp_path), METHOD.model(), of_client, 0)
    assert (description["classes"], description["columns"]) == (["no", "yes"], ["height", "weight"])


@pytest.mark.parametrize("made", [CsvFile, OwnTable])
@pytest.mark.parametrize("classes", [None, ["no", "yes"]])
def test_classes_that_a_client_would_number_alone_are_refused(classes, made, tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,yes\n2,no\n3,yes\n4,no\n")
    table = made(path=str(tmp_path), target="y", classes=classes, test_fraction=0.5)
    refused = pytest.raises(
        MisconfigurationException, match=rf"{made.__name__}: classes must be given in a deployed federation"
    )
    with refused if classes is None else nullcontext():
        own_data(table, 0, federation(METHOD.phases(), tmp_path))


def test_batches_that_are_no_pairs_are_refused(tmp_path):
    with pytest.raises(
        MisconfigurationException, match="FromDatasets: collate_fn gives batches of dict, but must give"
    ):
        Participant(federation(METHOD.phases(), tmp_path), METHOD.model(), lazy(as_dicts=True), 0, tmp_path)


def test_a_description_says_nothing_of_single_samples(tmp_path):
    """A run that was made in Python knows checksums of the data that it was made with: they stay."""
    said = []
    for change in (0, 1):
        datamodule = data()
        datamodule.arrays.x_train[0] += change
        said.append(participant(METHOD, datamodule, tmp_path, 0, **OF_TRAINER).answer(Message("describe")).values)
    assert said[0] == said[1] and "phases" in said[0]["configuration"]["objects"]
