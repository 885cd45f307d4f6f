"""Both backends give every client the same result; a lean Trainer gives the bits of an ordinary one."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EveryBatch,
    Expert,
    OneWeight,
    PureOneWeight,
    TensorData,
    assert_same_bits,
    blobs,
    mixture,
    momentum_sgd,
    sparse_mixture,
    two_quadratics,
)
from helpers.backends import FEW, UNEQUAL, WithBatchNorm, assert_agree, begin, local_training, train, train_clients
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from fedmoe_pl.algorithms import (
    ClusterMixture,
    EpsilonGreedyIFCA,
    FedAvg,
    FedMoEDA,
    FedProx,
    FineTunedCluster,
    Local,
    OptInFedAvg,
    PersonalizedExpert,
    PFLMoE,
    Scaffold,
    SpecialistMixture,
)
from fedmoe_pl.algorithms.algorithm import Algorithm, Update
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend, data_on
from fedmoe_pl.backends.backend import fold
from fedmoe_pl.backends.lean import needs_every_batch
from fedmoe_pl.backends.rounding import is_close, largest_value
from fedmoe_pl.backends.stacked import StackedPlan
from fedmoe_pl.backends.trainer import TrainerPlan
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.data import RandomCrop, RandomHorizontalFlip
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import (
    VGG16,
    ClusteredMoE,
    ConstantGate,
    FeatureGate,
    Gate,
    LeNet5,
    LinearGate,
    NetworkGate,
    PersonalizedMoE,
    SmallMLP,
)
from fedmoe_pl.rounds.phase import Phase


class TwoGroups(PersonalizedMoE):
    """Two parameter groups with learning rates, momenta and decays of their own, and a schedule."""

    def configure_optimizers(self):
        groups = [
            {"params": [*self.global_expert.parameters()], "lr": 0.1, "momentum": 0.9},
            {"params": [*self.local_expert.parameters(), *self.gate.parameters()], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class Proximal(FedAvg):
    """FedProx: a loss of its own with constants that differ from client to client."""

    def client_init(self, client, sent):
        super().client_init(client, sent)
        shift = 0.01 * client.id
        return {"strength": 0.5, "centre": {name: sent[name] + shift for name in ("gate.linear.bias",)}}

    def client_loss(self, module, batch, const):
        loss, metrics = module.loss(batch)
        parameters = dict(module.named_parameters())
        distance = sum(((parameters[name] - centre) ** 2).sum() for name, centre in const["centre"].items())
        return loss + const["strength"] * distance, metrics


class NoClassIgnored(PersonalizedMoE):
    """A loss that does not know of labels to ignore, so that batches cannot be padded."""

    def loss(self, batch):
        x, y = batch
        logits, weights = self.mix(x)
        return ((logits - F.one_hot(y, 3)) ** 2).mean(), {"logits": logits, "gate_weights": weights}


OPTIMIZERS = {
    "momentum": momentum_sgd,
    "adam": partial(torch.optim.Adam, lr=0.01),
    "fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "nesterov with decay": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "dampening": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, lr_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}
ALGORITHMS = {
    "FedAvg": (FedAvg(), LinearGate),
    "FedAvg, uniform": (FedAvg(weighting="uniform"), LinearGate),
    "FedPer": (FedAvg(shared="*.extractor.*"), LinearGate),
    "global expert": (FedAvg(shared="global_expert.*"), lambda _: ConstantGate(1)),
    "Local": (Local(), LinearGate),
    "PFL-FT": (PersonalizedExpert(), lambda _: ConstantGate(0)),
    "PFL-FB": (PersonalizedExpert("local_expert.classifier.*", gate_fraction=0.25), lambda _: ConstantGate(0)),
    "PFL-MF": (PFLMoE(), LinearGate),
    "PFL-MFE": (PFLMoE(), lambda _: FeatureGate(6)),
    "opt-out": (OptInFedAvg(opt_out_data=0.3), LinearGate),
    "specialist and gate": (SpecialistMixture(), lambda features: NetworkGate(nn.Linear(features, 1))),
    "own loss": (Proximal(), LinearGate),
    "FedProx": (FedProx(0.5), LinearGate),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_backends_agree_for_every_optimizer_on_unequal_clients(optimizer):
    module = mixture(LinearGate(5), optimizer=optimizer)
    assert_agree(local_training(module, FedAvg(), blobs(UNEQUAL, batch_size=10)), 1e-10)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_backends_agree_for_every_algorithm_on_unequal_clients(name):
    algorithm, gate = ALGORITHMS[name]
    assert_agree(local_training(mixture(gate(5)), algorithm, blobs(UNEQUAL, batch_size=10), max_epochs=3), 1e-10)


@pytest.mark.parametrize("mixing", ["probabilities", "log_probabilities", "probabilities_without_log"])
@pytest.mark.parametrize("name", ["PFL-FT", "specialist and gate"])
def test_backends_agree_whatever_is_mixed(name, mixing):
    algorithm, gate = ALGORITHMS[name]
    module = mixture(gate(5))
    module.mixing = mixing
    assert_agree(local_training(module, algorithm, blobs(UNEQUAL, batch_size=10), max_epochs=3), 1e-10)


@pytest.mark.parametrize("num_experts", [3, [2, 3, 1]], ids=str)
@pytest.mark.parametrize("algorithm", [FedMoEDA(), FedMoEDA(trainable=["gate.*", "experts.*"])], ids=["all", "frozen"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "nesterov with decay"])
def test_backends_agree_for_sparse_experts(optimizer, algorithm, num_experts):
    module = sparse_mixture(num_experts, OPTIMIZERS[optimizer], load_balancing=0.1)
    assert_agree(local_training(module, algorithm, blobs(UNEQUAL, batch_size=10), max_epochs=3), 1e-10)


def test_backends_agree_for_an_expert_that_no_sample_is_sent_to():
    """Its weight decay is that of the closed form: (1 - 0.1 * 0.5) in each of 2 epochs of 2 steps."""
    module = sparse_mixture(3, partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
    for index, proxy in enumerate(module.gate.proxies):  # of an embedding whose values are above 0
        torch.nn.init.constant_(proxy.weight, -9.0 if index == 1 else 1.0)
    training = local_training(module, FedMoEDA(), blobs((7, 8), batch_size=4))
    assert_agree(training, 1e-10)
    for backend in (TrainerBackend(), StackedBackend(2)):
        _, kept = train(backend, training)
        expected = module.experts[1][0].weight.detach() * 0.95**4
        for client in (0, 1):
            torch.testing.assert_close(kept[client]["experts.1.0.weight"], expected, rtol=1e-12, atol=0)


CLUSTERED = {
    "IFCA": (EpsilonGreedyIFCA(epsilon=0.0), lambda: ConstantGate([1.0, 0.0, 0.0])),
    "IFCA, epsilon-greedy": (EpsilonGreedyIFCA(0.5, patience=1), lambda: ConstantGate([1.0, 0.0, 0.0])),
    "fine-tuned cluster": (FineTunedCluster(), lambda: ConstantGate([1.0, 0.0, 0.0])),
    "mixture of clusters": (ClusterMixture(["gate.*", "local_expert.*"]), lambda: NetworkGate(nn.Linear(5, 3))),
    "mixture of clusters, whole": (ClusterMixture("*"), lambda: NetworkGate(nn.Linear(5, 3))),
}


@pytest.mark.parametrize("name", CLUSTERED)
def test_backends_agree_for_clusters_of_which_each_client_trains_another(name):
    algorithm, gate = CLUSTERED[name]
    torch.manual_seed(2)
    module = ClusteredMoE(Expert(), 2, gate=gate(), optimizer=momentum_sgd).double()
    data = blobs(UNEQUAL, batch_size=10, validation_fraction=0.2)
    assert_agree(local_training(module, algorithm, data, max_epochs=3), 1e-10, round=9)
    if isinstance(algorithm, EpsilonGreedyIFCA):
        tallies = {name for name in train(TrainerBackend(), local_training(module, algorithm, data))[0].sent}
        assert {"clusters/tally/0", "clusters/tally/1"} <= tallies, "one cluster alone would prove little"


@pytest.mark.parametrize("optimizer", [momentum_sgd, partial(torch.optim.Adam, lr=0.01, weight_decay=0.01)])
def test_backends_agree_in_single_precision(optimizer):
    module = mixture(LinearGate(5), dtype=torch.float32, optimizer=optimizer)
    assert_agree(local_training(module, FedAvg(), blobs(UNEQUAL, batch_size=10, dtype=torch.float32), 1), 1e-5)


def test_backends_agree_with_two_parameter_groups_and_a_schedule():
    made = mixture(LinearGate(5))
    module = TwoGroups(made.global_expert, made.local_expert, made.gate).double()
    assert_agree(local_training(module, FedAvg(), blobs(UNEQUAL, batch_size=10), max_epochs=3), 1e-10)


@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
)
def test_backends_agree_with_clipping(clip):
    assert_agree(local_training(mixture(LinearGate(5)), FedAvg(), blobs(FEW), **clip), 1e-10)


def test_backends_agree_with_batch_normalization():
    module = mixture(expert=WithBatchNorm())
    training = local_training(module, FedAvg(), blobs(FEW, batch_size=6))
    assert_agree(training, 1e-10)
    update, _ = train(StackedBackend(4), training)
    assert update.sent["global_expert.extractor.1.running_mean"].abs().max() > 0.01


def test_backends_agree_where_batches_cannot_be_padded():
    made = mixture(LinearGate(5))
    module = NoClassIgnored(made.global_expert, made.local_expert, made.gate, momentum_sgd).double()
    assert_agree(local_training(module, FedAvg(), blobs(UNEQUAL, batch_size=10)), 1e-10)


class WordExpert(Expert):
    """Reads three ids of words."""

    def __init__(self):
        super().__init__(features=4)
        self.extractor = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 6), nn.Tanh())


@pytest.mark.parametrize("algorithm", [FedAvg(), PFLMoE(), PersonalizedExpert("local_expert.classifier.*")])
def test_backends_agree_on_ids_of_words(algorithm):
    x = torch.randint(20, (46, 3), generator=torch.Generator().manual_seed(0))
    parts = torch.arange(46).split([25, 7, 11, 3])  # padded, and with a last batch of one sample
    data = TensorData(x, x[:, 0] % 3, parts, dtype=torch.int64, batch_size=6)
    data.setup()
    gate = FeatureGate(6) if isinstance(algorithm, PFLMoE) else ConstantGate(0.5)
    assert_agree(local_training(mixture(gate, WordExpert()), algorithm, data, max_epochs=3), 1e-10)


def test_backends_agree_with_alternating_rounds():
    algorithm = PFLMoE(interleaved=True)
    training = local_training(mixture(LinearGate(5)), algorithm, blobs(FEW), max_epochs=1, rounds=2)
    assert_agree(training, 1e-10, round=0)


@pytest.mark.parametrize("expert", [LeNet5(in_channels=1), SmallMLP(1024)], ids=["LeNet5", "SmallMLP"])
def test_backends_agree_for_models_of_images_with_augmentation(expert, images):
    module = PersonalizedMoE(expert, optimizer=momentum_sgd).double()
    assert_agree(local_training(module, FedAvg(), images([RandomCrop(), RandomHorizontalFlip()])), 1e-10)


@pytest.mark.slow
def test_backends_agree_for_vgg16(images):
    module = PersonalizedMoE(VGG16(in_channels=1, dropout=0.0), optimizer=partial(torch.optim.SGD, lr=0.01)).double()
    assert_agree(local_training(module, FedAvg(), images([]), max_epochs=1), 1e-10)


@pytest.fixture
def images():
    def make(augmentation):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(12, 1, 32, 32, generator=generator)
        y = torch.randint(10, (12,), generator=generator)
        parts = torch.arange(12).split([7, 5])
        data = TensorData(x, y, parts, dtype=torch.float64, batch_size=3, augmentation=augmentation)
        data.setup()
        return data

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
def test_a_gpu_gives_what_a_cpu_gives(backend):
    data = blobs(UNEQUAL, batch_size=10)
    expected, _ = train(TrainerBackend(), local_training(mixture(LinearGate(5)), FedAvg(), data))
    training = local_training(mixture(LinearGate(5)), FedAvg(), data, accelerator="gpu")
    device = torch.device("cuda", 0)
    update, _ = train(backend, replace(training, device=device, datamodule=data_on(data, device)))
    torch.testing.assert_close(update.sent, expected.sent, rtol=1e-10, atol=1e-10)


def test_any_number_of_clients_per_stack_gives_the_same():
    training = local_training(mixture(LinearGate(5)), FedAvg(), blobs(UNEQUAL, batch_size=10))
    expected, _ = train(StackedBackend(8), training)
    for clients_per_stack in (1, 3):
        update, _ = train(StackedBackend(clients_per_stack), training)
        torch.testing.assert_close(update.sent, expected.sent, rtol=1e-12, atol=1e-12)


def test_a_stack_trains_the_closed_form():
    """Ten full-batch steps at 0.05 on a/2 (w - b)^2 leave b + (w - b) (1 - 0.05 a)^10 on each client."""
    data = two_quadratics()
    data.setup()
    training = local_training(PureOneWeight(), ByLoss(), data, max_epochs=10)
    update, _ = train(StackedBackend(2), training)
    expected = sum(b + (0 - b) * (1 - 0.05 * a) ** 10 for a, b in ((1, 0), (4, 5))) / 2
    assert update.sent["weight"].item() == pytest.approx(expected, rel=1e-12)


class ByLoss(FedAvg):
    """Makes the clients train by the module's pure loss."""

    def client_loss(self, module, batch, const):
        return module.loss(batch)


REFUSED = {
    "dropout": (lambda: (mixture(expert=Expert(dropout=0.3)), {}), "random"),
    "callbacks": (lambda: (mixture(), {"callbacks": [EarlyStopping("validation_loss")]}), "callbacks"),
    "best epoch": (lambda: (mixture(), {"callbacks": [BestEpoch()]}), "callbacks"),
    "accumulation": (lambda: (mixture(), {"accumulate_grad_batches": 2}), "accumulate_grad_batches is 2"),
    "precision": (lambda: (mixture(), {"precision": "16-mixed"}), "precision is 16-mixed"),
    "optimizer": (
        lambda: (mixture(dtype=torch.float32, optimizer=torch.optim.Adafactor), {}),
        "Adafactor may not step every parameter element by element",
    ),
    "own training_step": (lambda: (OneWeight(), {}), "OneWeight has a training_step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stacked_is_refused_with_a_reason_and_auto_takes_the_other_way(name):
    make, reason = REFUSED[name]
    module, trainer = make()
    training = local_training(module, FedAvg(), blobs(FEW, dtype=next(module.parameters()).dtype), **trainer)
    with pytest.raises(MisconfigurationException, match=reason):
        StackedBackend().plan(training)
    plan = AutoBackend().plan(training)
    assert isinstance(plan, TrainerPlan)
    assert reason in plan.description


def test_auto_stacks_linear_layers_and_takes_a_trainer_per_client_for_convolutions_on_a_cpu(images):
    auto = AutoBackend()
    assert isinstance(auto.plan(local_training(mixture(), FedAvg(), blobs(FEW))), StackedPlan)
    convolving = PersonalizedMoE(LeNet5(), optimizer=momentum_sgd).double()
    assert isinstance(auto.plan(local_training(convolving, FedAvg(), images([]))), TrainerPlan)
    frozen = PersonalizedExpert("local_expert.classifier.*")  # its extractor's features are computed once
    assert isinstance(auto.plan(local_training(convolving, frozen, images([]))), StackedPlan)


def test_a_federation_refuses_an_explicit_choice_before_training_and_names_the_phase(tmp_path):
    phases = [Phase("first", FedAvg(), evaluate=False), Phase("second", FedAvg(), evaluate=False)]
    federation = Federation(phases, backend=StackedBackend(), logger=False, default_root_dir=str(tmp_path))
    with pytest.raises(MisconfigurationException, match=r"'first'.*StackedBackend.*random"):
        federation.fit(mixture(expert=Expert(dropout=0.3)), blobs(FEW))
    assert not list(tmp_path.iterdir())


def test_clients_per_stack_is_at_least_one():
    with pytest.raises(MisconfigurationException, match="clients_per_stack is 0, but must be at least 1"):
        StackedBackend(0)


LEAN = {
    "plain": {},
    "clipping": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "half precision": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_lean_trainer_gives_the_bits_of_an_ordinary_one(name, dropout):
    made = mixture(LinearGate(5), expert=Expert(dropout=dropout), dtype=torch.float32)
    module = TwoGroups(made.global_expert, made.local_expert, made.gate)
    data = blobs(FEW, dtype=torch.float32)
    lean = local_training(module, FedAvg(), data, 3, **LEAN[name])
    ordinary = local_training(module, FedAvg(), data, 3, **LEAN[name], callbacks=[EveryBatch()])
    assert needs_every_batch(lean) is None and needs_every_batch(ordinary)
    assert_same_bits(train(TrainerBackend(), lean)[0].sent, train(TrainerBackend(), ordinary)[0].sent)


def test_a_lean_trainer_stops_early_where_an_ordinary_one_does():
    data = blobs((40, 40), validation_fraction=0.3)
    stopping = EarlyStopping("validation_loss", patience=1, min_delta=0.02)
    arguments = {"limit_val_batches": 1.0, "max_epochs": 30}
    module = mixture(LinearGate(5))
    lean = local_training(module, FedAvg(), data, **arguments, callbacks=[stopping])
    ordinary = local_training(module, FedAvg(), data, **arguments, callbacks=[stopping, EveryBatch()])
    assert needs_every_batch(lean) is None
    update = train(TrainerBackend(), lean)[0]
    assert_same_bits(update.sent, train(TrainerBackend(), ordinary)[0].sent)
    unstopped = train(TrainerBackend(), local_training(module, FedAvg(), data, max_epochs=30))[0]
    assert not torch.equal(update.sent["gate.linear.weight"], unstopped.sent["gate.linear.weight"])


class Counting(Expert):
    """Counts how many samples its extractor has seen."""

    seen = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.extractor[1].register_forward_hook(lambda part, inputs, output: Counting.count(len(output)))

    @classmethod
    def count(cls, samples):
        cls.seen += samples


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(8)])
def test_a_frozen_extractor_sees_every_sample_once(backend):
    def seen(max_epochs):
        module = mixture(ConstantGate(0), expert=Counting())
        algorithm = PersonalizedExpert("local_expert.classifier.*")
        Counting.seen = 0
        train(backend, local_training(module, algorithm, blobs(FEW), max_epochs))
        return Counting.seen

    assert seen(50) == seen(5) < 5 * sum(FEW)


def test_features_give_what_computing_them_in_every_step_gives():
    data, algorithm = blobs(FEW), PFLMoE()
    module = mixture(FeatureGate(6))
    looked_up = train(TrainerBackend(), local_training(module, algorithm, data, 5))[1]
    computed = train(TrainerBackend(), local_training(module, algorithm, data, 5, callbacks=[EveryBatch()]))[1]
    for client in computed:
        torch.testing.assert_close(looked_up[client], computed[client], rtol=1e-12, atol=1e-12)


def test_features_are_kept_for_all_rounds_of_a_phase():
    class Frozen(FedAvg):
        def is_trainable(self, name, round, epoch):
            return "classifier" in name

    module = mixture(ConstantGate(0.5), expert=Counting())
    algorithm = Frozen(shared="*.classifier.*")
    training = local_training(module, algorithm, blobs((200, 300)), max_epochs=1, rounds=50)
    plan = begin(TrainerBackend(), training)
    train_clients(plan)
    Counting.seen = 0
    train_clients(plan, round=1)
    assert Counting.seen < 500  # the few samples that are traced, in place of two experts on 500


def test_nothing_is_looked_up_behind_augmentation(images):
    module = PersonalizedMoE(LeNet5(), gate=ConstantGate(0), optimizer=momentum_sgd).double()
    algorithm = PersonalizedExpert("local_expert.classifier.*")
    training = local_training(module, algorithm, images([RandomCrop()]), 3)
    ordinary = local_training(module, algorithm, images([RandomCrop()]), 3, callbacks=[EveryBatch()])
    expected = train(TrainerBackend(), ordinary)[1]
    for client, tree in train(TrainerBackend(), training)[1].items():
        assert_same_bits(tree, expected[client])


def shared_extractor():
    module = mixture()
    module.local_expert.extractor = module.global_expert.extractor
    return module


class CountsSamples(Gate):
    """A running load, assigned rather than changed in place, which the loss depends on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x):
        self.load = 0.9 * self.load + 0.1 * x.detach().abs().mean()
        logit = self.linear(x) + self.load
        return torch.cat((logit, -logit), 1).sigmoid()


class Noisy(LinearGate):
    """Draws whether it trains or not."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class OnlyGate(PersonalizedMoE):
    """An optimizer that has not got all parameters that are trainable."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.gate.parameters(), lr=0.5)


def only_gate():
    made = mixture(LinearGate(5))
    return OnlyGate(made.global_expert, made.local_expert, made.gate).double()


class BatchMean(PersonalizedMoE):
    """A small term that depends on the whole batch, labels or not."""

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return loss + 1e-5 * metrics["logits"].mean(0).square().sum(), metrics


def batch_mean():
    made = mixture(LinearGate(5))
    return BatchMean(made.global_expert, made.local_expert, made.gate, momentum_sgd).double()


class StepCounting(PersonalizedMoE):
    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return loss * (1 + self.global_step), metrics


def step_counting():
    made = mixture(LinearGate(5))
    return StepCounting(made.global_expert, made.local_expert, made.gate, momentum_sgd).double()


def with_first(layer):
    """Both experts with a layer without parameters in front."""
    expert = Expert()
    expert.extractor = nn.Sequential(layer, *expert.extractor[1:])
    return mixture(expert=expert)


class Late(FedAvg):
    """Constants that differ from the third client on."""

    def client_init(self, client, sent):
        return super().client_init(client, sent) | {"late": client.id > 1}

    def client_loss(self, module, batch, const):
        loss, metrics = module.loss(batch)
        return loss * (2 if const["late"] else 1), metrics


class ByTurns(FedAvg):
    def is_trainable(self, name, round, epoch):
        return ("classifier" if epoch % 2 else "extractor") in name


class Teacher(FedAvg):
    """The global expert is never trained or shared, but drawn nearer to the local one after every round, and kept."""

    def is_trainable(self, name, round, epoch):
        return name.startswith("local_expert.")

    def is_shared(self, name):
        return False

    def client_final(self, client, const):
        state = client.module.state_dict()
        with torch.no_grad():
            for name in [name for name in state if name.startswith("global_expert.")]:
                state[name].lerp_(state[name.replace("global", "local")], 0.5)
        return super().client_final(client, const)


TRAPS = {
    "an extractor of both experts": (shared_extractor, FedAvg(), {}),
    "a gate that draws, behind frozen experts": (lambda: mixture(Noisy(5)), PFLMoE(), {}),
    "a buffer that is assigned": (lambda: mixture(CountsSamples()), FedAvg(), {}),
    "an optimizer of some parameters, and clipping": (only_gate, FedAvg(), {"gradient_clip_val": 0.05}),
    "clipping by value in capitals": (
        lambda: mixture(LinearGate(5)),
        FedAvg(),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "VALUE"},
    ),
    "a small term of the whole batch": (batch_mean, FedAvg(), {}),
    "a loss that counts steps": (step_counting, FedAvg(), {}),
    "statistics without parameters": (lambda: with_first(nn.BatchNorm1d(5, affine=False)), FedAvg(), {}),
    "frozen statistics of every batch": (
        lambda: with_first(nn.BatchNorm1d(5, track_running_stats=False)),
        PersonalizedExpert("local_expert.classifier.*"),
        {},
    ),
    "constants that differ late": (lambda: mixture(LinearGate(5)), Late(), {}),
    "parts trained by turns": (lambda: mixture(LinearGate(5)), ByTurns(), {}),
}


@pytest.mark.parametrize("name", TRAPS)
def test_whatever_auto_takes_gives_what_an_ordinary_trainer_gives(name):
    make, algorithm, arguments = TRAPS[name]
    data = blobs((30, 25, 11, 20), batch_size=4)
    ordinary = local_training(make(), algorithm, data, **arguments, callbacks=[EveryBatch()])
    expected, expected_kept = train(TrainerBackend(), ordinary)
    training = local_training(make(), algorithm, data, **arguments)
    for backend in (TrainerBackend(), AutoBackend()):
        update, kept = train(backend, training)
        torch.testing.assert_close(update.sent, expected.sent, rtol=1e-10, atol=1e-10)
        assert kept.keys() == expected_kept.keys()
        for client in kept:
            torch.testing.assert_close(kept[client], expected_kept[client], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(4)])
def test_features_are_computed_anew_when_what_computes_them_has_changed(backend):
    def rounds(backend, **arguments):
        training = local_training(mixture(LinearGate(5)), Teacher(), blobs((13, 9)), 1, rounds=3, **arguments)
        plan, kept = begin(backend, training), {}
        for round in range(3):
            for group in plan.train({}, [0, 1], dict(kept), round):
                kept |= group.kept
        return kept

    expected = rounds(TrainerBackend(), callbacks=[EveryBatch()])
    for client, tree in rounds(backend).items():
        torch.testing.assert_close(tree, expected[client], rtol=1e-10, atol=1e-10)


def test_a_client_with_a_sample_that_is_no_number_spoils_no_other():
    data = blobs((13, 9, 11))
    data.x[data.train_samples[1][0]] = torch.nan
    module = mixture(ConstantGate(0))
    training = local_training(module, PersonalizedExpert("local_expert.classifier.*"), data, 3)
    expected = train(TrainerBackend(), training)[1]
    kept = train(StackedBackend(3), training)[1]
    for client in (0, 2):
        torch.testing.assert_close(kept[client], expected[client], rtol=1e-10, atol=1e-10)


def test_hooks_of_a_users_module_are_called_or_refused(tmp_path):
    class Hooked(PersonalizedMoE):
        called = 0

        def on_train_batch_end(self, *arguments):
            Hooked.called += 1

    made = mixture()
    module = Hooked(made.global_expert, copy.deepcopy(made.local_expert), None, momentum_sgd).double()
    training = local_training(module, FedAvg(), blobs((4, 4), batch_size=4), max_epochs=3)
    assert "hooks of its own" in str(needs_every_batch(training))
    train(AutoBackend(), training)
    assert Hooked.called == 2 * 3
    federation = Federation([Phase("own loss", PersonalizedExpert(), start="initial")], default_root_dir=str(tmp_path))
    with pytest.raises(MisconfigurationException, match="on_train_batch_end"):
        federation.fit(module, blobs((4, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_leaves_of_zero_is_close_to_zero_and_a_difference_is_not(dtype):
    """A sum of n values of size v is off by about n eps v; any more is a difference, as it is without larger values."""
    eps = torch.finfo(dtype).eps
    zero, rounding = torch.zeros(3, dtype=dtype), torch.tensor([0, 40 * eps, -90 * eps], dtype=dtype)
    assert is_close(rounding, zero, largest_of_all=1.0)
    assert not is_close(2 * rounding, zero, largest_of_all=1.0)
    assert not is_close(rounding, zero)
    assert not is_close(torch.ones(3, dtype=dtype), 1 + 2000 * rounding, largest_of_all=1.0)
    assert largest_value([None, zero, torch.tensor([-3.0, float("nan")]), torch.empty(0)]) == 3


def test_groups_follow_from_the_cohort_alone():
    training = local_training(mixture(), FedAvg(), blobs(UNEQUAL))
    plan = TrainerBackend().plan(training)
    assert plan.groups([5, 2, 7]) == [[5], [2], [7]]
    assert StackedBackend(3).plan(training).groups(range(8)) == [[1, 5, 4], [6, 2, 3], [7, 0]]
    many = plan.groups(range(1000))
    assert len(many) <= 64 and [client for group in many for client in group] == list(range(1000))


def test_fold_is_the_weighted_mean():
    updates = [Update({"w": torch.tensor([float(value)])}, weight) for value, weight in ((0, 1), (4, 3), (2, 4))]
    folded = fold(Algorithm(), updates)
    assert folded.sent["w"].item() == pytest.approx((0 * 1 + 4 * 3 + 2 * 4) / 8)
    assert folded.weight == 8


def test_backends_agree_on_scaffold_and_its_steps():
    module = mixture(LinearGate(5), optimizer=partial(torch.optim.SGD, lr=0.1))
    assert_agree(local_training(module, Scaffold(), blobs(UNEQUAL, batch_size=10), max_epochs=3), 1e-10)
