"""Clients in Trainers of their own, and in one that they share: its bits, what it costs, what it frees."""

import gc
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import ClassVar

import pytest
import torch
from helpers import EveryBatch, Expert, TensorData, assert_same_bits, blobs, mixture, phase, run
from helpers.backends import FEW, UNEQUAL, TwoGroups, begin, local_training, train, train_clients
from helpers.clusters import all_phases, clustered
from helpers.models import plain_trainer, trainer
from helpers.runs import federation as federation_of
from helpers.workers import TwoInThisProcess
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import trees
from fedmoe_pl.algorithms import FedAvg, FedProx, FineTuning, PFLMoE
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import LEAN_TRAINER, AutoBackend, StackedBackend, TrainerBackend, on_device
from fedmoe_pl.backends import trainer as trainers
from fedmoe_pl.backends.features import FeatureCache
from fedmoe_pl.backends.loop import _SAME_IN_ALL, NeedsTrainerError, needs_every_batch
from fedmoe_pl.backends.workers.pickling import dumps
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import FeatureGate, LinearGate, PersonalizedMoE
from fedmoe_pl.phases.phase import Phase, Train
from fedmoe_pl.setup.check_trainer import check_trainer


def test_chunks_hold_small_clients_only_and_never_change_the_groups():
    training = local_training(mixture(LinearGate(5)), FedAvg(), blobs((1500, 600, 10, 10, 10, 1900, 700)), max_epochs=1)
    plan = TrainerBackend().plan(training)
    groups = plan.groups(range(7))
    assert groups == [[client] for client in range(7)]
    assert plan.chunks(groups) == [[[0]], [[1], [2], [3], [4]], [[5]], [[6]]], "2000 samples in all epochs"
    assert plan.chunks(groups[2:5], at_least=3) == [[[2]], [[3]], [[4]]]
    longer = local_training(mixture(LinearGate(5)), FedAvg(), blobs((600, 500, 500)), max_epochs=2)
    assert TrainerBackend().plan(longer).chunks([[0], [1], [2]]) == [[[0]], [[1], [2]]]


@pytest.fixture
def served(monkeypatch):
    """The number of clients that each shared Trainer served; frozen parts are computed in every step."""
    monkeypatch.setattr(FeatureCache, "find", lambda *arguments: None)
    served, trained = [], []
    original, guarded = trainers.in_one_step, trainers.guarded
    monkeypatch.setattr(trainers, "guarded", lambda *arguments: trained.append(1) or guarded(*arguments))

    def counted(training, function):
        trained.clear()
        original(training, function)
        served.append(len(trained))

    monkeypatch.setattr(trainers, "in_one_step", counted)
    return served


RUNS = {
    "FedProx": lambda: [phase("it", FedProx(0.1), rounds=2, clients_per_round=5)],
    "interleaved": lambda: [
        phase("F", FedAvg()),
        phase("it", PFLMoE(interleaved=True), rounds=4, train=Train(keep_optimizer=True)),
    ],
    "clusters and dropout": all_phases,
}


@pytest.mark.few("interleaved")
@pytest.mark.parametrize("name", RUNS)
def test_a_shared_trainer_gives_the_bits_of_a_trainer_per_client(tmp_path, served, name):
    states = []
    for every_batch in (False, True):
        model = clustered() if name.startswith("clusters") else mixture(FeatureGate(6))
        arguments = {"backend": TrainerBackend(), "seed": 2, "every_batch": every_batch}
        data = blobs() if name.startswith("clusters") else blobs(FEW if name == "interleaved" else UNEQUAL)
        federation = run(RUNS[name](), model, data, tmp_path / str(every_batch), **arguments)
        states.append(federation.run.states)
        assert bool(served) != every_batch
        assert every_batch or max(served) > 1, "a Trainer served several clients"
        served.clear()
    shared, alone = states
    for phase_name in shared:
        assert_same_bits(shared[phase_name].server, alone[phase_name].server)
        assert shared[phase_name].clients.keys() == alone[phase_name].clients.keys()
        for client, tree in shared[phase_name].clients.items():
            assert_same_bits(dict(tree), dict(alone[phase_name].clients[client]))


class OnGraph(Expert):
    """Multiplies its input by a matrix that is a buffer, but not saved."""

    def __init__(self, matrix):
        super().__init__()
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x):
        return super().forward((self.matrix @ x.T).T)


@pytest.mark.few("auto")
@pytest.mark.parametrize("backend", ["auto", TrainerBackend()])
def test_a_sparse_buffer_is_as_good_as_a_dense_one(backend, tmp_path):
    matrix = torch.eye(5, dtype=torch.float64).roll(1, 0)
    servers = []
    for name, each in (("sparse", matrix.to_sparse()), ("dense", matrix)):
        module = mixture(LinearGate(5), OnGraph(each))
        assert dumps(module), "for worker processes"
        finished = run([phase("it", FedAvg(), rounds=2)], module, blobs(FEW), tmp_path / name, backend=backend)
        servers.append(finished.run.states["it"].server)
    torch.testing.assert_close(*servers, rtol=1e-12, atol=1e-12)


LEAN = {
    "plain": {},
    "clipping": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "half precision": {"precision": "bf16-mixed"},
    "all batches": {"limit_train_batches": 1.0},
}


@pytest.mark.few("clipping", "half precision")
@pytest.mark.parametrize("name", LEAN)
def test_a_bare_loop_respects_the_arguments_of_the_trainer(name):
    module = mixture(LinearGate(5), Expert(dropout=0.3), torch.float32, kind=TwoGroups)
    data = blobs(FEW, dtype=torch.float32)
    lean = local_training(module, FedAvg(), data, 3, **LEAN[name])
    ordinary = local_training(module, FedAvg(), data, 3, **LEAN[name], callbacks=[EveryBatch()])
    assert needs_every_batch(lean) is None
    assert needs_every_batch(local_training(module, FedAvg(), data, limit_train_batches=1)), "one batch, and not all"
    assert needs_every_batch(ordinary)
    assert_same_bits(train(TrainerBackend(), lean)[0].sent, train(TrainerBackend(), ordinary)[0].sent)


def test_the_environment_has_no_influence_on_the_trainers_of_clients(monkeypatch):
    training = local_training(mixture(), FedAvg(), blobs(), callbacks=[EveryBatch()])
    expected = train(TrainerBackend(), training)[0].sent
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "1")
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "0")
    assert_same_bits(train(TrainerBackend(), training)[0].sent, expected)
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "no accelerator")
    assert check_trainer({**LEAN_TRAINER, "devices": 1})


def test_a_callback_ends_the_training_and_reads_the_parts_of_the_client_s_mixture():
    class Reading(Callback):
        def on_train_end(self, trainer, pl_module):
            seen.append((trainer.current_epoch, pl_module, {name for name, _ in pl_module.named_parameters()}))

    seen = []
    stopping = EarlyStopping("validation_loss", patience=1, min_delta=0.02)
    arguments = {"limit_val_batches": 1.0, "max_epochs": 30, "callbacks": [stopping, Reading()]}
    data = blobs((40, 40), validation_fraction=0.3)
    train(TrainerBackend(), local_training(mixture(LinearGate(5)), FedAvg(), data, **arguments))
    for epochs, module, names in seen:
        assert epochs < 29 and isinstance(module, PersonalizedMoE) and isinstance(module.gate, LinearGate)
        assert "gate.linear.weight" in names and not vars(module).keys() & {"training_step", "validation_step"}


def test_the_learning_rate_follows_what_a_client_validates():
    class Rates(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates = []
    module, data = mixture(LinearGate(5)), blobs((40,), validation_fraction=0.3)
    module.lr_scheduler = partial(ReduceLROnPlateau, monitor="validation_loss", factor=0.5, patience=0, threshold=0.9)
    arguments = {"limit_val_batches": 1.0, "max_epochs": 4, "callbacks": [Rates()]}
    train(TrainerBackend(), local_training(module, FedAvg(), data, **arguments))
    assert rates == [0.1, 0.1, 0.05, 0.025]  # the first loss is the best; no later one is a tenth of it


def test_validation_batches_of_which_nothing_counts_leave_the_mean_as_it_is(monkeypatch):
    class Losses(Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append([trainer.callback_metrics["validation_loss"], module.criterion(pl_module(x), y)])

    seen, data, module = [], blobs((40,), validation_fraction=0.3), mixture(LinearGate(5))
    module.criterion = torch.nn.CrossEntropyLoss(ignore_index=0)
    samples = data.validation_samples[0]
    x, y = data.x[samples], data.y[samples]
    assert 0 < (y == 0).sum() < len(y)
    monkeypatch.setattr(TensorData, "evaluated_at_once", 1)
    arguments = {"limit_val_batches": 1.0, "max_epochs": 1, "callbacks": [Losses()]}
    train(TrainerBackend(), local_training(module, FedAvg(), data, **arguments))
    torch.testing.assert_close(*seen[0], check_dtype=False)


def test_hooks_of_a_users_module_are_called_or_refused(tmp_path):
    class Hooked(PersonalizedMoE):
        called = 0

        def on_train_batch_end(self, *arguments):
            Hooked.called += 1

    module = mixture(kind=Hooked)
    training = local_training(module, FedAvg(), blobs((4, 4), batch_size=4), max_epochs=3)
    assert "its own training_step or hooks" in str(needs_every_batch(training))
    train(AutoBackend(), training)
    assert Hooked.called == 2 * 3
    federation = Federation([Phase("own loss", FineTuning(), start="initial")], default_root_dir=str(tmp_path))
    with pytest.raises(MisconfigurationException, match="on_train_batch_end"):
        federation.fit(module, blobs((4, 4)))


def test_a_hook_that_one_module_was_given_is_called(tmp_path):
    module, sent = mixture(), []
    for factor in (1.0, 0.0):
        module.on_after_backward = MethodType(partial(_scale_gradients, factor=factor), module)
        training = local_training(module, FedAvg(), blobs((4, 4)))
        assert "its own training_step or hooks" in str(needs_every_batch(training))
        sent.append(train(AutoBackend(), training)[0].sent)
    del module.on_after_backward
    assert_same_bits(sent[0], train(TrainerBackend(), local_training(module, FedAvg(), blobs((4, 4))))[0].sent)
    assert_same_bits(sent[1], module.state_dict())


def _scale_gradients(module, factor):
    for parameter in (each for each in module.parameters() if each.grad is not None):
        parameter.grad.mul_(factor)


class HasItsLoss(FedAvg):
    """Its last hook calls the loss that the client's module has then."""

    def client_final(self, client, constants):
        (batch,) = client.datamodule.batches(client.samples, batch_size=len(client.samples))
        state = {"loss/loss": client.module.loss(batch)[0].detach()}
        return replace(super().client_final(client, constants), state=state)


def test_the_loss_that_one_module_was_given_is_used_and_stays():
    results = []
    for callbacks in (None, [EveryBatch()]):
        module = mixture(LinearGate(5))
        module.loss = MethodType(_half_loss, module)
        training = local_training(module, HasItsLoss(), blobs((8, 4)), callbacks=callbacks)
        assert needs_every_batch(training) is None or callbacks
        update, kept = train(TrainerBackend(), training)
        results.append({**update.sent, **{str(client): tree["loss/loss"] for client, tree in kept.items()}})
    assert_same_bits(*results)
    whole = train(TrainerBackend(), local_training(mixture(LinearGate(5)), FedAvg(), blobs((8, 4))))[0].sent
    assert not torch.equal(whole["gate.linear.weight"], results[0]["gate.linear.weight"])


def _half_loss(module, batch):
    loss, values = PersonalizedMoE.loss(module, batch)
    return loss / 2, values


class WithoutClosure(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()


@pytest.mark.parametrize("callbacks", [None, [EveryBatch()]])
def test_an_optimizer_that_does_not_call_its_closure_is_refused_with_any_trainer(callbacks):
    module = mixture(LinearGate(5), optimizer=partial(WithoutClosure, lr=0.1))
    with pytest.raises(MisconfigurationException, match="closure"):
        train(TrainerBackend(), local_training(module, FedAvg(), blobs((4, 4)), callbacks=callbacks))


class TwoLayers(LightningModule):
    """A user's own module, whose first layer the test freezes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = torch.nn.Linear(5, 4).double(), torch.nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(self.body(x).tanh())

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


HOOKS = ["setup", "on_fit_start", "on_train_start", "configure_optimizers"]


EPOCHS = [*((hook, [0]) for hook in HOOKS), ("on_train_epoch_start", [0, 2])]
OF_CALLBACKS = [(hook, epochs, True) for hook, epochs in EPOCHS if hook != "configure_optimizers"]


@pytest.mark.parametrize(("hook", "epochs", "of_callback"), [*((*each, False) for each in EPOCHS), *OF_CALLBACKS])
@plain_trainer
def test_what_hooks_freeze_stays_frozen_until_they_unfreeze_it(hook, epochs, of_callback, tmp_path):
    def frozen(self, *arguments, **named):
        module = arguments[1] if of_callback else self
        is_now = module.current_epoch in epochs if hook == "on_train_epoch_start" else True
        module.body.requires_grad_(not is_now)
        return original(self) if hook == "configure_optimizers" else None

    original = TwoLayers.configure_optimizers
    kind = type("Hooked", (TwoLayers,), {} if of_callback else {hook: frozen})
    callbacks = [type("Freeze", (Callback,), {hook: frozen})()] if of_callback else []
    data = blobs((9,), batch_size=9)
    update, _ = train(TrainerBackend(), local_training(kind(), FedAvg(), data, 4, callbacks=callbacks))
    alone, samples = kind(), data.train_samples[0]
    batches = DataLoader(TensorDataset(data.x[samples], data.y[samples]), batch_size=9)
    trainer(tmp_path, max_epochs=4, callbacks=callbacks).fit(alone, batches)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(update.sent[name], tensor, rtol=1e-12, atol=1e-12)
    assert torch.equal(update.sent["body.weight"], kind().body.weight) == (hook != "on_train_epoch_start")


class Asking(FedAvg):
    """Keeps what a client's module, and its Trainer, say of themselves in every step, and prints."""

    seen: ClassVar[list] = []

    def client_loss(self, module, batch, constants):
        own = module.current_epoch, module.global_step, module.trainer.max_epochs, module.training
        self.seen.append((own, {name: getattr(module.trainer, name) for name in _SAME_IN_ALL - {"datamodule"}}))
        module.print("a step")
        return super().client_loss(module, batch, constants)


def test_a_module_sees_its_own_progress_in_the_shared_trainer_which_says_what_a_client_s_own_says(served):
    seen = []
    for callbacks in (None, [EveryBatch()]):
        Asking.seen = []
        training = local_training(mixture(LinearGate(5)), Asking(), blobs((8, 4)), 3, callbacks=callbacks)
        train(TrainerBackend(), training)
        seen.append(Asking.seen)
    first = [(epoch, 2 * epoch + step, 3, True) for epoch in range(3) for step in range(2)]
    second = [(epoch, epoch, 3, True) for epoch in range(3)]
    assert served == [2] and seen[0] == seen[1] and [own for own, _ in seen[0]] == first + second


class Annealed(FedAvg):
    """A loss whose weight follows what the module's Trainer says."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def client_loss(self, module, batch, constants):
        done = (module.global_step + 1) / self.ask(module.trainer)
        return (1.1 - min(done, 1.0)) * super().client_loss(module, batch, constants)


def fails_otherwise(trainer):
    """The refusal of a question becomes another error."""
    try:
        return trainer.num_training_batches
    except NeedsTrainerError:
        raise ValueError from None


def stops(trainer):
    """Ends the training after the third step."""
    if trainer.global_step == 2:
        trainer.should_stop = True
    return 10


ASKING = [attrgetter("estimated_stepping_batches"), attrgetter("num_training_batches"), fails_otherwise, stops]


@pytest.mark.parametrize("ask", ASKING)
def test_a_loss_that_reads_what_only_its_own_trainer_knows_gets_one(ask, served):
    sent = []
    for callbacks in (None, [EveryBatch()]):
        training = local_training(mixture(LinearGate(5)), Annealed(ask), blobs((8, 4)), 3, callbacks=callbacks)
        plan = begin(TrainerBackend(), training)
        sent.append(train_clients(plan)[0].sent)
        assert not plan.shares_trainer, "the next round does not try again"
    assert len(served) == 1
    assert_same_bits(*sent)
    assert not torch.equal(sent[0]["gate.linear.weight"], mixture(LinearGate(5)).gate.linear.weight)


class LooksBack(FedAvg):
    """Keeps what a client's module says of its training when it has ended."""

    def __init__(self, ask):
        super().__init__()
        self.ask, self.seen = ask, {}

    def client_final(self, client, constants):
        self.seen[client.id] = self.ask(client.module)
        return super().client_final(client, constants)


def batches_or_none(module):
    """The number of batches, if whatever refuses to tell it is no error."""
    try:
        return module.trainer.num_training_batches
    except Exception:
        return None


LOOKING_BACK = [attrgetter("global_step", "current_epoch"), attrgetter("trainer.num_training_batches"), batches_or_none]


@pytest.mark.parametrize("ask", LOOKING_BACK)
def test_after_its_training_a_module_says_what_its_own_trainer_would_have_said(ask):
    seen = []
    for backend, callbacks in ((TrainerBackend(), [EveryBatch()]), (TrainerBackend(), None), (StackedBackend(), None)):
        training = local_training(mixture(), LooksBack(ask), blobs((9, 4, 2)), 3, callbacks=callbacks)
        train(backend, training)
        seen.append(training.algorithm.seen)
    assert seen[0] == seen[1] == seen[2] and seen[0].keys() == {0, 1, 2}
    assert ask is not LOOKING_BACK[0] or seen[0] == {0: (9, 3), 1: (3, 3), 2: (3, 3)}


class SendsViews(FedAvg):
    def client_final(self, client, constants):
        state = {name: tensor for name, tensor in client.module.state_dict().items() if self.is_shared(name)}
        return Update(state, len(client.samples), {"gate.linear.bias": client.module.state_dict()["gate.linear.bias"]})


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
def test_an_algorithm_may_return_the_module_s_own_tensors(backend):
    data = blobs(FEW)
    update, kept = train(backend, local_training(mixture(LinearGate(5)), SendsViews("global_expert.*"), data))
    expected, expected_kept = train(backend, local_training(mixture(LinearGate(5)), FedAvg("global_expert.*"), data))
    assert_same_bits(update.sent, expected.sent)
    for client in kept:
        assert torch.equal(kept[client]["gate.linear.bias"], expected_kept[client]["gate.linear.bias"])


class RemembersConstants(FedAvg):
    """Notes which constants each client made, and which it gets back."""

    def __init__(self):
        super().__init__()
        self.made, self.returned = {}, {}

    def client_init(self, client, sent):
        self.made[client.id] = super().client_init(client, sent) | {"number": torch.tensor(client.id + 1.0)}
        return self.made[client.id]

    def client_loss(self, module, batch, constants):
        return module.loss(batch)[0] * constants["number"]

    def client_final(self, client, constants):
        self.returned[client.id] = constants
        return super().client_final(client, constants)


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(4)])
def test_the_last_hook_gets_the_constants_as_the_first_returned_them(backend):
    plan = begin(backend, local_training(mixture(), RemembersConstants(), blobs(FEW)))
    train_clients(plan)
    algorithm = plan.training.algorithm
    assert algorithm.returned.keys() == {0, 1, 2, 3}
    for client, constants in algorithm.returned.items():
        assert constants is algorithm.made[client]


def test_constants_are_moved_whatever_holds_them():
    bias = torch.zeros(2)
    constants = {"strength": 0.5, "received": {"gate.bias": bias}, "prototypes": [torch.ones(3), None], "cluster": 1}
    moved = on_device(constants, torch.device("meta"))
    assert moved["received"]["gate.bias"].device.type == "meta"
    assert moved["prototypes"][0].device.type == "meta"
    assert (moved["strength"], moved["prototypes"][1], moved["cluster"]) == (0.5, None, 1)
    assert constants["received"]["gate.bias"] is bias
    assert on_device(constants, torch.device("cpu"))["received"]["gate.bias"] is bias


KINDS = {
    "clients that share a Trainer": (TrainerBackend(), {}),
    "clients with a Trainer": (TrainerBackend(), {"callbacks": [Callback()]}),
    "a stack": (StackedBackend(), {}),
}


def live_parameters(training) -> int:
    """How many live tensors, of those that are collected, have the shape of one of the module's weights."""
    shape = training.initial["global_expert.classifier.1.weight"].shape
    found = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    return sum(tensor.shape == shape for tensor in found)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cycles", [False, True])
def test_models_are_freed_at_once_or_if_they_form_cycles_when_they_are_too_large(kind, cycles, monkeypatch):
    """Without the collector's own runs, which do not know how large tensors are."""
    backend, arguments = KINDS[kind]
    model = mixture()
    if cycles:
        model.itself = [model]
    training = local_training(model, FedAvg(), blobs((4,)), 1, rounds=8, **arguments)
    plan, live = begin(backend, training), []
    gc.collect()
    gc.disable()
    try:
        for round in range(8):
            monkeypatch.setattr(trees, "_MOST_DEAD", 0 if round < 4 else 2**40)
            train_clients(plan, round)
            live.append(live_parameters(training))
    finally:
        gc.enable()
    assert max(live[:4]) < live[-2] < live[-1] if cycles else len({*live[1:]}) == 1


@pytest.mark.parametrize("logger", [False, True])
def test_a_profiler_writes_what_each_client_s_training_took_to_its_folder(logger, tmp_path):
    arguments = {"profiler": "simple", "default_root_dir": str(tmp_path), "logger": logger}
    train(TrainerBackend(), replace(local_training(mixture(), FedAvg(), blobs((4, 4)), **arguments), phase_name="it"))
    texts = [path.read_text() for path in tmp_path.rglob("it/client_*/round_0001/fit-profile.txt")]
    assert len(texts) == 2 and all("run_training_epoch" in text for text in texts)


class Noting(Callback):
    """Notes the number of samples of the data module, in whatever hook comes first and last."""

    def setup(self, trainer, pl_module, stage):
        sizes.append(len(trainer.datamodule.y))

    def on_fit_end(self, trainer, pl_module):
        sizes.append(len(pl_module.trainer.datamodule.y))


class InItsLoss(PersonalizedMoE):
    def loss(self, batch):
        sizes.append(len(self.trainer.datamodule.y))
        return super().loss(batch)


class InItsStep(TwoLayers):
    def training_step(self, batch, batch_idx):
        sizes.append(len(self.trainer.datamodule.y))
        return super().training_step(batch, batch_idx)


class Watched(TensorData):
    """Data that note which of their hooks are called."""

    calls = ()

    def prepare_data(self):
        self.calls = (*self.calls, "prepare_data")

    def setup(self, stage=None):
        self.calls = (*self.calls, "setup")
        super().setup(stage)

    def teardown(self, stage):
        self.calls = (*self.calls, "teardown")


sizes = []


CASES = {
    "a callback": (mixture, [Noting()]),
    "a mixture's loss": (partial(mixture, kind=InItsLoss), None),
    "a training step": (InItsStep, None),
    "nothing": (mixture, [EveryBatch()]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("in_workers", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_of_a_client_has_the_federation_s_data_module_and_calls_none_of_its_hooks(
    tmp_path, case, in_workers
):
    make, callbacks = CASES[case]
    backend = TwoInThisProcess(AutoBackend()) if in_workers else AutoBackend()
    trainer = {"max_epochs": 2, "accelerator": "cpu", "callbacks": callbacks}
    phases = [Phase("it", FedAvg(), rounds=2, evaluate=False)]
    given, sizes[:] = blobs().arrays, []
    data = Watched(given.x_train, given.y_train, torch.arange(32).split([13, 8, 11]), dtype=torch.float64)
    federation_of(tmp_path, phases, trainer=trainer, backend=backend).fit(make(), data)
    assert data.calls == ("prepare_data", "setup")
    assert case == "nothing" or (len(sizes) >= 4 and {*sizes} == {len(data.y)})
