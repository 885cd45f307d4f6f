"""Clients that were not in the federation get their models from its checkpoint and their own data alone."""

import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EveryBatch,
    TensorData,
    assert_same_bits,
    blobs,
    client_generator,
    mixture,
    sparse_mixture,
    tensors,
    train_by_hand,
)
from helpers.architectures import pair, train_bare
from helpers.backends import WithBatchNorm
from helpers.pfedmoe import model as of_three_architectures
from helpers.reports import csv_rows
from helpers.runs import Notes
from helpers.runs import federation as federation_of
from helpers.workers import TwoInThisProcess
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator, nn

from fedmoe_pl import Evaluate, Select
from fedmoe_pl.algorithms import (
    FML,
    ClusterMixture,
    EpsilonGreedyIFCA,
    FedAPEN,
    FedAvg,
    FedKD,
    FedMoEDA,
    FedPAC,
    FedProx,
    FedRep,
    FineTuning,
    Local,
    PFedMoE,
)
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import IID, AGNews, CsvFile
from fedmoe_pl.models import (
    BiLSTM,
    ClusteredMoE,
    ConstantGate,
    GlobalOnly,
    LocalOnly,
    MixtureWeights,
    NetworkGate,
    PersonalizedMoE,
)
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.phases.phase import Phase, Train

sgd = partial(torch.optim.SGD, lr=0.1)
FEDPER = "global_expert.extractor.*"
federation = partial(federation_of, trainer={"max_epochs": 2, "accelerator": "cpu"})


def fedavg(shared="global_expert.*", **kwargs):
    return Phase("FedAvg", FedAvg(shared, "global_expert.*"), gate=ConstantGate(1.0), **kwargs)


def trained(path, *phases):
    run = federation(path, [*phases])
    run.fit(mixture(optimizer=sgd), blobs())
    return run, run.run_dir / "checkpoints/last.ckpt"


def new_data(**kwargs):
    """Two clients, whose samples are none of the federation's."""
    data = blobs(sizes=(9, 6), **kwargs)
    data.x = data.x + 0.5
    return data


@pytest.mark.few(1)
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_newcomer_fine_tunes_the_federation_s_model_on_its_own_data(tmp_path, rounds):
    fine_tuned = Phase("Fine-tuned", FineTuning(), gate=ConstantGate(0.0))
    run, checkpoint = trained(tmp_path, fedavg(rounds=3, clients_per_round=2, select=Select("global_test")), fine_tuned)
    content = checkpoint.read_bytes()

    later = federation(tmp_path / "later", [fedavg(rounds=3), fine_tuned])
    data = new_data()
    results = later.personalize(mixture(optimizer=sgd), data, str(checkpoint), rounds)
    assert set(results) == {"FedAvg", "Fine-tuned"} and len(results["Fine-tuned"].clients) == 2
    assert results["FedAvg"].selection == "given checkpoint"
    for client in (0, 1):
        module = mixture(ConstantGate(0.0), optimizer=sgd)
        known = run.client_module("FedAvg", 0).global_expert.state_dict()
        module.global_expert.load_state_dict(known)
        module.local_expert.load_state_dict(known)
        before = max(rounds, results["FedAvg"].round)  # FedAvg's local rounds, or those of its result
        generator = client_generator(0, client, before)
        batches = data.batches(data.train_samples[client], generator=generator)
        train_by_hand(module, "local_expert.", batches, sgd, 2)
        actual = later.client_module("Fine-tuned", client).state_dict()
        torch.testing.assert_close(dict(actual), dict(module.state_dict()), rtol=0, atol=1e-12)
    assert checkpoint.read_bytes() == content


def test_what_old_clients_kept_reaches_no_newcomer(tmp_path):
    _, checkpoint = trained(tmp_path, Phase("Local", Local(), train=Train(max_epochs=3)), fedavg(FEDPER, rounds=2))
    nothing = Train(max_epochs=0)
    later = federation(tmp_path / "later", [Phase("Local", Local(), train=nothing), fedavg(FEDPER, train=nothing)])
    later.personalize(mixture(optimizer=sgd), new_data(), str(checkpoint), rounds=1)
    assert not any(later.run.states[name].clients for name in ("Local", "FedAvg"))


def test_the_files_of_newcomers_have_the_numbers_after_all_local_rounds(tmp_path):
    _, checkpoint = trained(tmp_path, fedavg(FEDPER, rounds=2))
    seen = Notes(on_evaluation_end=lambda run, phase, evaluation: run.states[phase.name].round)
    later = federation(tmp_path / "later", [fedavg(FEDPER, rounds=2)], callbacks=[seen])
    later.personalize(mixture(optimizer=sgd), new_data(), str(checkpoint), rounds=3)
    ((of_round,), (result,)) = (csv_rows(later.run_dir / f"{name}.csv") for name in ("rounds", "summary"))
    assert {name: of_round.get(name) for name in result if name != "mean_gate_weight_mean"}.items() <= result.items()
    assert seen.noted == [3]


def images(low, high):
    x = torch.randint(low, high, (12, 1, 2, 2), generator=Generator().manual_seed(low), dtype=torch.uint8)
    return TensorData(x, torch.arange(12) % 3, [range(6), range(6, 12)], batch_size=4)


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    """A model of images, the images of a federation, and its checkpoint."""
    expert = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    model, data = mixture(expert=expert, dtype=torch.float32), images(0, 100)
    run = federation(tmp_path_factory.mktemp("images"), [fedavg(rounds=1)])
    run.fit(model, data)
    return model, data, str(run.run_dir / "checkpoints/last.ckpt")


@pytest.mark.parametrize(("low", "high"), [(100, 256), (1, 100)], ids=["brighter", "alike"])
def test_images_of_newcomers_are_normalized_as_the_federation_s(low, high, of_images, tmp_path, recwarn):
    model, first, checkpoint = of_images
    second = images(low, high)
    federation(tmp_path, [fedavg(rounds=1)]).personalize(model, second, checkpoint)
    pixels, newcomers = (each.arrays.x_train.double() / 255 for each in (first, second))
    mean, std = pixels.mean(), pixels.std(correction=0)
    torch.testing.assert_close(second.x[:12].double(), (newcomers - mean) / std, rtol=0, atol=1e-5)
    texts = [str(each.message) for each in recwarn if "new clients' pixels" in str(each.message)]
    assert len(texts) == (low == 100)
    for text in texts:
        assert f"is {newcomers.mean():.2f}, more than one standard deviation ({std:.2f}) from the feder" in text
        assert f"'s, {mean:.2f}; are the images prepared in the same way?" in text


def test_newcomers_images_that_were_normalized_by_themselves_are_refused(of_images, tmp_path):
    """Data that were set up before would be seen otherwise than the federation's, in silence."""
    model, _, checkpoint = of_images
    for newcomers, fits in ((images(100, 256), False), (images(0, 100), True)):
        newcomers.setup()
        later = federation(tmp_path / str(fits), [fedavg(rounds=1)])
        if fits:
            later.personalize(model, newcomers, checkpoint)
            continue
        with pytest.raises(MisconfigurationException, match="normalizes images as the new clients' data do"):
            later.personalize(model, newcomers, checkpoint)


def test_words_of_newcomers_have_the_federation_s_ids(tmp_path):
    """The newcomers' texts have the same words, the rarest first, and one that the federation does not know."""
    topics = ["war peace", "ball goal", "bank money", "chip code"]
    files = {"old": [1, 2, 3, 4] * 6 + [1, 1, 1], "new": [4, 3, 2, 1] * 6 + [4, 4, 4]}
    for folder, labels in files.items():
        (tmp_path / folder).mkdir()
        rows = [f'"{label}","{topics[label - 1]}","{"new " if folder == "new" else ""}"\n' for label in labels]
        for part in ("train", "test"):
            (tmp_path / folder / f"{part}.csv").write_text("".join(rows))

    def data(folder):
        return AGNews(str(tmp_path / folder), vocabulary_size=9, length=3, num_clients=2, partitioner=IID())

    model = PersonalizedMoE(BiLSTM(11, 8, 8), optimizer=partial(torch.optim.SGD, lr=0.1))
    run = federation(tmp_path, [fedavg(rounds=1)])
    run.fit(model, data("old"))
    later = federation(tmp_path / "later", [fedavg(rounds=1)])
    newcomers = data("new")
    later.personalize(model, newcomers, str(run.run_dir / "checkpoints/last.ckpt"))
    # ids go by falling frequency, then by alphabet: peace, war, ball, bank, chip, code, goal, money from 2 on
    expected = {1: [3, 2, 1], 2: [4, 8, 1], 3: [5, 9, 1], 4: [6, 7, 1]}
    assert newcomers.x.tolist() == 2 * [expected[label] for label in files["new"]]


def test_a_newcomer_s_table_with_other_columns_is_refused(tmp_path):
    def table(columns):
        path = tmp_path / f"{columns[0]}.csv"
        path.write_text("\n".join([f"site,y,{','.join(columns)}", *(f"a,{index % 2},{index},1" for index in range(8))]))
        return CsvFile(str(path), "y", "site", test_fraction=0.5)

    model = PersonalizedMoE(torch.nn.Linear(2, 2))
    run = federation(tmp_path / "run", [fedavg(evaluate=False)])
    run.fit(model, table(["height", "weight"]))
    checkpoint = run.run_dir / "checkpoints" / "last.ckpt"
    again = federation(tmp_path / "newcomers", [fedavg(evaluate=False)])
    again.personalize(model, table(["weight", "height"]), checkpoint)
    refusal = r"columns is \['age', 'weight'\], but must be those of the federation, \['height', 'weight'\]\."
    with pytest.raises(InvalidArgumentError, match=refusal):
        again.personalize(model, table(["age", "weight"]), checkpoint)
    with pytest.raises(MisconfigurationException, match=r"other columns \(now with age and without height\)"):
        run.fit(model, table(["age", "weight"]), ckpt_path=checkpoint)


def test_newcomers_are_refused_without_what_they_need(tmp_path):
    _, checkpoint = trained(tmp_path, fedavg(rounds=1))
    other = federation(tmp_path / "other", [Phase("FedProx", FedAvg("global_expert.*"))])
    with pytest.raises(MisconfigurationException, match=r"in which 'FedProx' has finished"):
        other.personalize(mixture(), new_data(), str(checkpoint))
    local = federation(tmp_path / "local", [Phase("Local", Local())])
    with pytest.raises(MisconfigurationException, match="none of the phases is federated"):
        local.personalize(mixture(), new_data(), str(checkpoint))
    assert not (tmp_path / "other").exists()


def alone(module, shared, server, data, client, rounds, epochs=2, keeps_own_copy=False):
    """What a newcomer has after its local rounds: a bare loop that begins every round with what the server sends.

    It trains what it received only if it keeps a copy of its own, as it is after local training.
    """
    names = tuple(name for name, _ in module.named_parameters() if keeps_own_copy or name not in shared)
    for round in range(rounds):
        module.load_state_dict({**module.state_dict(), **{name: server[name] for name in shared}})
        batches = data.batches(data.train_samples[client], generator=client_generator(0, client, round))
        train_by_hand(module, names, batches, sgd, epochs, lambda *batch: module.loss(batch)[0])
    return tensors(module)


def personalized(tmp_path, model, phases, data, later_data, rounds):
    """A federation, and a later one of newcomers from its checkpoint."""
    run = federation(tmp_path, phases)
    run.fit(model, data)
    later = federation(tmp_path / "later", phases)
    later.personalize(model, later_data, str(run.run_dir / "checkpoints/last.ckpt"), rounds)
    return run, later


@pytest.mark.slow
def test_a_newcomer_of_fedmoe_da_trains_its_own_experts_behind_the_server_s_embedding(tmp_path):
    phases = [Phase("DA", FedMoEDA(top_p=2, interval=1), rounds=3, evaluate=Evaluate(after="aggregation"))]
    model, data = sparse_mixture(2, optimizer=sgd), new_data()
    run, later = personalized(tmp_path, model, phases, blobs(), data, 2)
    server = run.run.states["DA"].server
    shared = [name for name in model.state_dict() if name.startswith("embedding.")]
    for client in (0, 1):
        expected = alone(sparse_mixture(2, optimizer=sgd), shared, server, data, client, 2)
        actual = tensors(later.client_module("DA", client))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    traffic = later.run.states["DA"].traffic
    assert traffic["bytes_between_clients"] == 0
    embedding = sum(server[name].nbytes for name in shared)
    assert traffic["bytes_down"] == 2 * embedding, "a newcomer is sent no rows of the matrix, which are of others"


@pytest.mark.slow
def test_a_newcomer_of_pfedmoe_has_the_architecture_of_its_number(tmp_path):
    model, data = partial(of_three_architectures, optimizer=sgd), new_data()
    run, later = personalized(tmp_path, model(), [Phase("pFedMoE", PFedMoE(), rounds=2)], blobs(), data, 3)
    server = run.run.states["pFedMoE"].server
    for client in (0, 1):
        module = model()
        module.keep_architecture(client)
        expected = alone(module, [*server], server, data, client, 3, keeps_own_copy=True)
        torch.testing.assert_close(tensors(later.client_module("pFedMoE", client)), expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_newcomer_finds_the_cluster_of_its_kind_and_mixes_it_with_its_own_expert(tmp_path):
    """Two kinds of clients, whose labels contradict each other; the newcomers are one of each."""

    def kinds(sizes, seed):
        generator = Generator().manual_seed(seed)
        x = torch.randn(sum(sizes), 5, generator=generator)
        owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        y = (x[:, 0] > 0).long() ^ (owner % 2)
        data = TensorData(x, y, torch.arange(sum(sizes)).split(list(sizes)), dtype=torch.float64, batch_size=10)
        data.setup()
        return data

    torch.manual_seed(0)
    gate = NetworkGate(torch.nn.Linear(5, 3))
    model = ClusteredMoE(torch.nn.Linear(5, 2), 2, gate=gate, optimizer=partial(torch.optim.SGD, lr=0.5)).double()
    first = ConstantGate([1.0, 0.0, 0.0])
    phases = [
        Phase("Local", Local("local_expert.*"), gate=ConstantGate([0.0, 0.0, 1.0])),
        Phase("IFCA", EpsilonGreedyIFCA(epsilon=0.3), rounds=10, gate=first, start="Local"),
        Phase("MoE", ClusterMixture()),
    ]
    run, later = personalized(tmp_path, model, phases, kinds((40, 40, 40, 40), 1), kinds((20, 20), 2), 1)
    server = run.run.states["IFCA"].server
    newcomers = later.run.datamodule
    for client in (0, 1):
        x, y = newcomers.x[newcomers.train_samples[client]], newcomers.y[newcomers.train_samples[client]]
        experts = [(server[f"global_experts.{j}.weight"], server[f"global_experts.{j}.bias"]) for j in (0, 1)]
        accuracies = [((x @ weight.T + bias).argmax(1) == y).double().mean() for weight, bias in experts]
        assert max(accuracies) > 0.8 > 0.5 > min(accuracies), "the federation has found both kinds"
        best = accuracies.index(max(accuracies))
        chosen = later.client_module("IFCA", client).global_experts[0]
        assert_same_bits(dict(chosen.state_dict()), {"weight": experts[best][0], "bias": experts[best][1]})
        mixture = later.client_module("MoE", client)
        for expert, (weight, bias) in zip(mixture.global_experts, experts, strict=True):
            assert_same_bits(dict(expert.state_dict()), {"weight": weight, "bias": bias})
        local = later.client_module("Local", client).local_expert.state_dict()
        assert_same_bits(dict(mixture.local_expert.state_dict()), dict(local))
        assert not torch.equal(local["weight"], model.local_expert.weight)


def test_another_method_s_result_is_refused_in_one_sentence(tmp_path):
    """IFCA keeps books that FedAvg's checkpoint does not have."""
    torch.manual_seed(0)
    model = ClusteredMoE(torch.nn.Linear(5, 3), 2, optimizer=sgd).double()
    first = ConstantGate([1.0, 0.0, 0.0])
    run = federation(tmp_path, [Phase("it", FedAvg("global_experts.*"), gate=first)])
    run.fit(model, blobs())
    later = federation(tmp_path / "later", [Phase("it", EpsilonGreedyIFCA(), gate=first)])
    refusal = r"of the same method and model, because the server's state of 'it' lacks 'clusters/"
    with pytest.raises(MisconfigurationException, match=refusal):
        later.personalize(model, new_data(), str(run.run_dir / "checkpoints/last.ckpt"))


def test_a_result_with_more_than_the_phase_shares_is_refused(tmp_path):
    """FedPer would be evaluated with FedAvg's classifier, which its clients would not have."""
    _, checkpoint = trained(tmp_path, fedavg("global_expert.*"))
    later = federation(tmp_path / "later", [fedavg(FEDPER)])
    with pytest.raises(MisconfigurationException, match=r"state of 'FedAvg' also has 'global_expert\.classifier"):
        later.personalize(mixture(optimizer=sgd), new_data(), str(checkpoint))


@pytest.mark.slow
def test_newcomers_need_no_files_of_the_federation_s_clients(tmp_path):
    run = federation(tmp_path, [fedavg(FEDPER, rounds=2)])
    run.fit(mixture(optimizer=sgd), blobs())
    shutil.rmtree(run.run_dir / "checkpoints/clients")
    later = federation(tmp_path / "later", [fedavg(FEDPER, rounds=2)])
    later.personalize(mixture(optimizer=sgd), new_data(), str(run.run_dir / "checkpoints/last.ckpt"), rounds=1)
    assert set(later.run.states["FedAvg"].clients) == {0, 1}


@pytest.mark.slow
def test_all_newcomers_train_alone_whatever_the_federation_s_cohort(tmp_path):
    local = Phase("Local", Local(), clients_per_round=1)
    _, checkpoint = trained(tmp_path, fedavg(rounds=1), local)
    failures = ClientFailures(min_clients=3, dropout=0.99)  # there are two newcomers
    later = federation(tmp_path / "later", [fedavg(rounds=1), local], failures=failures)
    later.personalize(mixture(optimizer=sgd), new_data(), str(checkpoint))
    assert set(later.run.states["Local"].clients) == {0, 1}


TEACHING = {  # a private and a shared model teach each other
    "FML": (FML(), LocalOnly),
    "FedAPEN": (FedAPEN(0.4, 0.1), MixtureWeights),
    "FedKD": (FedKD(hidden_states=False), LocalOnly),
}
ROUNDS = 2


@pytest.fixture(scope="module", params=TEACHING)
def joined(request, tmp_path_factory):
    """A finished federation, and newcomers that have trained for two rounds."""
    name = request.param
    algorithm, gate = TEACHING[name]
    phases = [Phase(name, algorithm, rounds=3, gate=gate(), train=Train(max_epochs=1))]
    run, later = personalized(tmp_path_factory.mktemp("run"), pair(), phases, blobs(), new_data(), ROUNDS)
    return name, run.run.states[name], later


@pytest.mark.few(1)
def test_newcomers_have_the_federation_s_shared_model_and_train_a_private_one(joined):
    name, state, later = joined
    shared = {key: tensor for key, tensor in state.server.items() if key.startswith("global_expert.")}
    for client in (0, 1):
        module = later.client_module(name, client)
        assert_same_bits(tensors(module, "global_expert."), shared)
        private = tensors(module, "local_expert.")
        assert private and not any(torch.equal(tensor, pair().state_dict()[key]) for key, tensor in private.items())
        assert later.results[name].clients[client].global_test > 0.2
    assert not {key for key in later.run.states[name].server if key.startswith("update/")}


@pytest.mark.slow
@pytest.mark.parametrize("joined", ["FedAPEN"], indirect=True)
def test_newcomers_of_fedapen_learn_their_weight(joined):
    name, _, later = joined
    weights = [later.client_module(name, client).gate.weights[0].item() for client in (0, 1)]
    assert len({0.5, *weights}) == 3


def kl(student, teacher):
    return F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")


def private_loss(meme, private, x, y):
    """The meme is the federation's: it teaches, and does not learn."""
    z = private(x)
    return (F.cross_entropy(z, y) + kl(z, meme(x))) / 2


@pytest.mark.parametrize("joined", ["FML"], indirect=True)
def test_newcomers_of_fml_learn_from_the_federation_s_meme(joined):
    name, state, later = joined
    for client in (0, 1):
        own = pair().state_dict()
        for round in range(ROUNDS):
            own = train_bare(client, round, {**own, **state.server}, later.run.datamodule, private_loss)
        expected = {key: tensor for key, tensor in own.items() if key.startswith("local_expert.")}
        actual = tensors(later.client_module(name, client), "local_expert.")
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


EPOCHS = 3
ONE_BY_ONE = {"callbacks": [EveryBatch()]}
BACKENDS = {
    "in a Trainer that sees every batch": (TrainerBackend, ONE_BY_ONE),
    "one by one": (TrainerBackend, {}),
    "stacked": (StackedBackend, {}),
    "in workers": (lambda: TwoInThisProcess(AutoBackend()), {}),
}


class Normalized(WithBatchNorm):
    """Batch normalization without parameters, beside the linear layer that is not shared."""

    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 6))


CASES = {  # the algorithm, the expert, and in how many of the local epochs a newcomer trains what is not shared
    "FedPer": (lambda: FedAvg(FEDPER), None, EPOCHS),
    "LG-FedAvg": (lambda: FedAvg("global_expert.classifier.*"), None, EPOCHS),
    "FedRep": (lambda: FedRep(FEDPER, head_epochs=2), None, 2),
    "FedPAC": (lambda: FedPAC(weight=0.0), None, 1),
    "batch normalization": (lambda: FedAvg(FEDPER), WithBatchNorm, EPOCHS),
    "its statistics alone": (
        lambda: FedAvg(["global_expert.extractor.0.*", "global_expert.extractor.1.*"]),
        Normalized,
        EPOCHS,
    ),
}


def of_global_expert(expert=None):
    return mixture(GlobalOnly(), expert and expert(), optimizer=sgd)


def with_backend(path, algorithm, backend="one by one", rounds=1):
    make, arguments = BACKENDS[backend]
    trainer = {"max_epochs": EPOCHS, "accelerator": "cpu", **arguments}
    phases = [Phase("it", algorithm(), rounds=rounds, gate=GlobalOnly())]
    return federation(path, phases, trainer=trainer, backend=make())


@pytest.fixture(scope="module", params=CASES)
def before(request, tmp_path_factory):
    algorithm, expert, epochs = CASES[request.param]
    run = with_backend(tmp_path_factory.mktemp("before"), algorithm)
    run.fit(of_global_expert(expert), blobs())
    return run, algorithm, expert, epochs


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_newcomers_train_what_they_keep_around_what_the_server_has(before, backend, tmp_path):
    """Running statistics are those of the server."""
    run, algorithm, expert, epochs = before
    data = blobs(sizes=(10, 6))  # no batch of one sample, which is left out where there is batch normalization
    later = with_backend(tmp_path, algorithm, backend)
    later.personalize(of_global_expert(expert), data, str(run.run_dir / "checkpoints/last.ckpt"), ROUNDS)
    server = {name: tensor for name, tensor in run.run.states["it"].server.items() if "/" not in name}
    shared = {name: tensor for name, tensor in server.items() if algorithm().is_shared(name)}
    assert_same_bits({name: later.run.states["it"].server[name] for name in shared}, shared)
    for client in (0, 1):
        expected = alone(of_global_expert(expert).eval(), [*shared], shared, data, client, ROUNDS, epochs)
        actual = tensors(later.client_module("it", client), "global_expert.")
        torch.testing.assert_close(actual, {name: expected[name] for name in actual}, rtol=0, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", [FedAvg, partial(FedProx, 0.1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_newcomers_with_nothing_to_learn_receive_the_model(tmp_path, algorithm, backend):
    """Nothing depends on the local expert, which is not shared."""
    algorithm = partial(algorithm, shared="global_expert.*")
    run = with_backend(tmp_path, algorithm, backend)
    run.fit(of_global_expert(), blobs())
    server = run.run.states["it"].server
    run.personalize(of_global_expert(), blobs(sizes=(9, 6)), rounds=ROUNDS)
    state = run.run.states["it"]
    assert state.flops == 0 and not state.clients and state.round == 1
    torch.testing.assert_close(tensors(run.client_module("it", 1), "global_expert."), server, rtol=0, atol=0)


class HeadLater(FedAvg):
    """The head is trained from the second round on."""

    def is_trainable(self, name, round, epoch):
        return self.is_shared(name) or round >= 1


class BodyFirst(FedAvg):
    """The head is trained from the second epoch on."""

    def is_trainable(self, name, round, epoch):
        return self.is_shared(name) == (epoch < 1)


@pytest.mark.slow
def test_newcomers_wait_for_the_round_in_which_what_they_keep_is_trained(tmp_path):
    run = with_backend(tmp_path, lambda: HeadLater(FEDPER), rounds=2)
    run.fit(of_global_expert(), blobs())
    run.personalize(of_global_expert(), blobs(sizes=(9, 6)), rounds=3)
    state, start = run.run.states["it"], tensors(of_global_expert(), "global_expert.classifier.")
    assert state.round == 3 and not any(torch.equal(state.clients[0][name], start[name]) for name in start)


def test_newcomers_whose_first_epoch_trains_nothing_are_told_so(tmp_path):
    run = with_backend(tmp_path, lambda: BodyFirst(FEDPER))
    run.fit(of_global_expert(), blobs())
    with pytest.warns(UserWarning, match="^Phase 'it': newcomers train nothing, because BodyFirst trains none"):
        run.personalize(of_global_expert(), blobs(sizes=(9, 6)), rounds=3)
    assert not run.run.states["it"].clients


def test_a_newcomer_s_model_can_be_trained_on_as_a_whole(tmp_path):
    run = with_backend(tmp_path, lambda: FedAvg(FEDPER))
    run.fit(of_global_expert(), blobs())
    run.personalize(of_global_expert(), blobs(sizes=(9, 6)), rounds=1)
    assert all(parameter.requires_grad for parameter in run.client_module("it", 0).parameters())
