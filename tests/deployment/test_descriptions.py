"""What clients say of themselves before the first round, and whether a client that comes back is still the same."""

import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import GivenParts
from helpers.deployed import Deployment, Passing, federation, method_of, participant, simulated, with_values
from helpers.methods import data
from helpers.runs import assert_same
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, Dataset, Subset

from fedmoe_pl import Train
from fedmoe_pl.checkpoints.checkpoint import FILE
from fedmoe_pl.data import CsvFile, FromDatasets
from fedmoe_pl.deployment import Message, Participant, descriptions, serve
from fedmoe_pl.deployment.descriptions import own_data, read_descriptions
from fedmoe_pl.deployment.schema import FAILURES, problem_of_values
from fedmoe_pl.rounds import interruption
from fedmoe_pl.setup.data import TooManyClassesError

METHOD = method_of("FedPer", rounds=4)
CLIENT = 1


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch):
    monkeypatch.setattr(descriptions, "_SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(descriptions, "_BACK_WITHIN", 0)


def deployment_with(tmp_path, change, most=None, method=METHOD):
    """A deployment in which a client's description is changed."""
    deployed = Deployment(method, tmp_path)
    deployed.change(CLIENT, "describe", change, most)
    return deployed


def killed(tmp_path):
    deployed = Deployment(METHOD, tmp_path)
    deployed.run_until(lambda *_: len(deployed.heard) >= 20)
    return deployed


def state_of(deployed):
    return deployed.server.run.states["FedPer"]


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
        (lambda _: Message("failed", {"failure": "MemoryError"}), "it raised a MemoryError; its own log says more"),
    ],
)
def test_a_description_that_is_none_is_waited_for(change, reason, tmp_path):
    deployed = deployment_with(tmp_path, change, most=2)
    with pytest.warns(UserWarning, match=f"client {CLIENT} cannot take part: {reason}") as warned:
        deployed.run()
    assert len(warned) == 1 and not state_of(deployed).failed


def test_a_client_that_the_server_does_not_have_leaves_and_says_why(tmp_path):
    client = participant(METHOD, tmp_path, 3)
    assert client.answer(Message("describe", {"num_clients": 4})).kind == "description" and not client.leaves
    assert client.answer(Message("describe", {"num_clients": 3})).kind == "leaves"
    assert client.leaves == "client is 3, but must be at most 2, because the server counts from 0"


def test_a_client_with_other_settings_is_told_so_and_waited_for(tmp_path):
    notes = []

    def start_again_with_the_right_ones(client, message):
        if message.kind == "note":
            notes.append((client, message.values["text"]))
            deployed.participants[CLIENT] = deployed.started(CLIENT)

    deployed = Deployment(METHOD, tmp_path, start_again_with_the_right_ones)
    other = method_of("FedPer", rounds=7, train=Train(batch_size=2))
    deployed.participants[CLIENT] = deployed.started(CLIENT, method=other, seed=5)
    texts = [
        "seed is 5, but must be 0",
        "phases.FedPer.rounds is 7, but must be 4",
        "phases.FedPer.train.batch_size is 2, but must be null",
    ]
    reason = f"client {CLIENT} cannot take part: {'; '.join(texts)}, as on the server"
    with pytest.warns(UserWarning, match=reason):
        deployed.run()
    ((client, text),) = notes
    assert client == CLIENT and text.startswith(f"{reason}; end this command with Ctrl-C")
    assert not state_of(deployed).failed


@pytest.mark.slow
def test_a_server_that_continues_does_not_wait_for_clients_that_it_knows(tmp_path):
    deployed = killed(tmp_path)
    del deployed.participants[CLIENT]
    with pytest.warns(UserWarning) as warned:
        deployed.run("last")
    assert all(f"client {CLIENT} " in str(warning.message) for warning in warned)
    assert state_of(deployed).round == 4


def test_a_server_that_is_to_continue_a_run_begins_one_if_there_is_none_and_needs_nobody_once_it_has_ended(tmp_path):
    deployed = Deployment(METHOD, tmp_path)
    with pytest.warns(UserWarning, match=r"no run in .* has a checkpoint\. A new run begins"):
        deployed.run("last")
    assert state_of(deployed).round == 4
    del deployed.participants[CLIENT]
    before = len(deployed.passed)
    deployed.run("last")  # without a warning
    assert {message.kind for _, message in deployed.passed[before:]} == {"describe", "begin", "finish"}


def test_a_requeued_job_of_slurm_continues_its_run_also_if_it_ended_while_it_waited_for_clients(tmp_path, monkeypatch):
    deployed = Deployment(METHOD, tmp_path)
    server = deployed.run()
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    interruption._note(server.runs, server.command).write_text(str(server.run_dir / FILE))
    deployed.run_until(lambda client, message: message.kind == "describe")
    assert deployed.run().run_dir == server.run_dir
    assert interruption.requeued(server.runs, server.command) is None


def test_a_client_that_describes_more_samples_than_the_server_has_memory_for_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(descriptions, "_MOST_SAMPLES", 1000)
    reason = f"client {CLIENT}: it describes 1001 samples, and all clients together 1.*, which must be at most 1000"
    with pytest.raises(MisconfigurationException, match=reason):
        deployment_with(tmp_path, with_values(sizes=[1001, 0, 0], global_test=0)).run()


@pytest.mark.slow
def test_a_server_that_continues_waits_until_enough_clients_are_there(tmp_path):
    deployed, looks = killed(tmp_path), []
    everybody, deployed.participants = deployed.participants, {}

    def come_late(client, message):
        looks.append(client)
        if len(looks) == 15:  # at the third look
            deployed.participants = everybody

    deployed.before = come_late
    deployed.run("last")
    assert not state_of(deployed).failed


@pytest.mark.slow
def test_a_server_that_continues_waits_for_all_if_it_cannot_read_what_it_knew(tmp_path):
    deployed = killed(tmp_path)
    (path,) = tmp_path.glob("server/**/descriptions.json")
    path.write_text("{")
    before = len(deployed.heard)
    deployed.run("last")
    assert [message.kind for _, message in deployed.heard[before:]].count("describe") == 5
    assert not state_of(deployed).failed


def test_a_client_that_comes_back_with_other_data_or_settings_is_left_out(tmp_path, caplog):
    deployed, other = killed(tmp_path), method_of("FedPer", rounds=9, train=Train(batch_size=2))
    deployed.participants[0] = deployed.started(0, datamodule=data(validation_fraction=0.3))
    deployed.participants[3] = deployed.started(3, method=other, seed=7)
    with pytest.warns(UserWarning) as warned, caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        deployed.run("last")
    texts = {str(warning.message) for warning in warned}
    sizes = "numbers of training, validation and test samples [9, 4, 0] in place of [13, 0, 0]"
    settings = "rounds is 9, but must be 4; phases.FedPer.train.batch_size is 2, but must be null, as when the run beg"
    for client, own in ((0, f"its data have changed since the run began: {sizes}"), (3, settings)):
        reason = f"{FAILURES['configuration']}; its own log says more"
        assert f"Phase 'FedPer': client {client} has not confirmed that it has the result: {reason}" in texts, texts
        assert any(own in text for text in caplog.messages) and not any(own in text for text in texts)
    assert "this client has failed: seed is 7, but must be 0; " in caplog.text


def test_a_configuration_that_does_not_fit_a_client_ends_the_server_before_any_training(tmp_path):
    def refuse(*args):
        raise MisconfigurationException("FedPer: start is missing.")

    deployed = Deployment(METHOD, tmp_path)
    for each in deployed.participants.values():
        each.federation.run_of_client = refuse
    with pytest.raises(MisconfigurationException, match=r"^client \d: its configuration, data or files do not fit"):
        deployed.run()
    assert "update" not in {message.kind for _, message in deployed.heard}
    assert not [*tmp_path.glob("client*/**/*.safetensors")]


@pytest.mark.slow
def test_one_client_alone_cannot_end_the_server(tmp_path):
    deployed = Deployment(method_of("FedPer", rounds=4, clients_per_round=1.0), tmp_path)
    deployed.change(CLIENT, "train", lambda _: Message("failed", {"failure": "configuration"}))
    with pytest.warns(UserWarning) as warned:
        deployed.run()
    reason = f"client {CLIENT} is left out: {FAILURES['configuration']}; its own log says more"
    assert str(warned[0].message) == f"Phase 'FedPer', round 1: {reason}"
    assert state_of(deployed).round == 4


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


def with_data_of(folder, client, samples):
    """A client with data of its own."""
    return Participant(federation(METHOD.phases(), folder), METHOD.model(), samples, client, folder / f"{client}")


def served(folder, clients):
    """A server of samples that are read one by one, when it has ended."""
    server = federation(METHOD.phases(), folder / "server")
    serve(server, METHOD.model(), lazy(), Passing(clients), len(clients))
    return server


@pytest.mark.slow
def test_samples_that_are_read_one_by_one(tmp_path):
    parts = data().partitioner.parts
    simulation = simulated(METHOD, tmp_path, lazy(GivenParts(parts)))
    clients = {client: with_data_of(tmp_path, client, lazy(samples=part)) for client, part in enumerate(parts)}
    server = served(tmp_path, clients)
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
        clients[client] = with_data_of(path, client, samples)
    return clients


@pytest.mark.parametrize(
    ("folders", "difference"), [(("abc", "bca"), "'b' is 0, not 1"), (("ab", "c"), "'c' and 'a' are both 0")]
)
@pytest.mark.parametrize(
    ("kind", "targets"), [*((kind, None) for kind in KINDS), ("folder", lambda dataset: [y for _, y in dataset])]
)
def test_folders_that_number_a_class_differently_are_refused_together(kind, targets, folders, difference, tmp_path):
    clients = in_folders(tmp_path, folders[0], "", folders[1], "", "", kind=kind, targets=targets)
    refused = f"^client 2 must number its classes as the clients before it do, but {difference}; renumber them, such as"
    with pytest.raises(MisconfigurationException, match=refused):
        served(tmp_path, clients)


def test_a_client_may_lack_classes_and_their_names_may_have_joiners(tmp_path):
    """Persian words have them within."""
    classes = "a", "b", "\u0645\u06cc\u200c\u0634\u0648\u062f"
    server = served(tmp_path, in_folders(tmp_path, classes[:2], classes, *[()] * 3))
    assert read_descriptions(server.run_dir)[1]["class_numbers"] == {"a": 0, "b": 1, classes[2]: 2}


def test_a_client_with_more_classes_than_the_model_is_named(tmp_path):
    deployed = deployment_with(tmp_path, with_values(num_classes=7), method=method_of("FedPer", evaluate=True))
    with pytest.raises(TooManyClassesError) as error:
        deployed.run()
    assert error.value.because.endswith(f"; only client {CLIENT} has that many classes")


HEIGHT = r"of its samples are \['height'\], but must be None, as client 0's\."


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"shape": [3]}, r"the shape of its samples is \[3\], but"),
        ({"classes": ["height"]}, f"the classes {HEIGHT}"),
        ({"columns": ["height"]}, f"the columns {HEIGHT}"),
        ({"classes": ["height"] * 1000}, "the classes of its samples are "),
    ],
)
def test_data_of_another_shape_or_with_other_names_are_refused_together(values, reason, tmp_path):
    with pytest.raises(MisconfigurationException, match=f"^client {CLIENT}: {reason}") as error:
        deployment_with(tmp_path, with_values(**values)).run()
    assert len(str(error.value)) < 500, "many names are cut"


class OwnTable(CsvFile):
    """Passes what it does not know on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.parametrize(
    ("name", "problem"), [("poids\u00a0(kg)", ""), ("\u4f53\u91cd\u3000kg", ""), ("a\nb", "its columns")]
)
def test_names_of_columns_may_have_spaces_of_other_kinds(name, problem, tmp_path):
    """Such as those before a unit in a table of Excel."""
    answer = participant(METHOD, tmp_path, 0).answer(Message("describe", {"num_clients": 3}))
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
    sentence = f"{made.__name__}: classes must be given in a deployed federation"
    with nullcontext() if classes else pytest.raises(MisconfigurationException, match=sentence):
        own_data(table, 0, federation(METHOD.phases(), tmp_path))


def test_a_client_whose_values_were_taken_for_classes_is_told_what_helps(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,20\n2,30\n3,20\n4,30\n")
    with pytest.raises(MisconfigurationException, match=r"its own; in a table, .* a decimal point, such as 20\.0\.$"):
        own_data(CsvFile(str(tmp_path), "y", test_fraction=0.5), 0, federation(METHOD.phases(), tmp_path))


def test_data_that_are_dealt_already_are_refused(tmp_path):
    samples = federation(METHOD.phases(), tmp_path), lazy()
    assert own_data(samples[1], 2, samples[0]) is own_data(samples[1], 2, samples[0]), "by itself, they are its own"
    for dealt in (samples[1], data()):
        with pytest.raises(MisconfigurationException, match=f"{type(dealt).__name__}: must not be set up before join"):
            own_data(dealt, 1, samples[0])


def test_batches_that_are_no_pairs_are_refused(tmp_path):
    sentence = "FromDatasets: collate_fn gives batches of dict, but must give"
    with pytest.raises(MisconfigurationException, match=sentence):
        with_data_of(tmp_path, 0, lazy(as_dicts=True))


def test_a_description_says_nothing_of_single_samples(tmp_path):
    """A run that was made in Python knows checksums of the data that it was made with: they stay."""
    said = []
    for change in (0, 1):
        datamodule = data()
        datamodule.arrays.x_train[0] += change
        said.append(participant(METHOD, tmp_path, 0, datamodule).answer(Message("describe")).values)
    assert said[0] == said[1] and "phases" in said[0]["configuration"]["objects"]
