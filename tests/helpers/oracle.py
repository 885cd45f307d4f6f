"""What a plain Lightning Trainer and a mean give, written by hand, and which of a case's backends give something else.

The oracle shares with the package the samples of a client's batches, the seeds and the drawn cohorts, and nothing else:
each client of each round trains a deep copy of the user's module in a Trainer of its own.
"""

import copy
import random
from dataclasses import dataclass, fields
from functools import cache, partial

import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from torch import float64, nn

from fedmoe_pl import Federation, Phase, Train
from fedmoe_pl.algorithms import FedProx, FineTuning, PFLMoE
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.parts import set_aside
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.phases.participation import sample_cohort
from fedmoe_pl.seeds import derive_seed, seed_all
from helpers import blobs
from helpers.data import without_labels
from helpers.ingredients import (
    ALGORITHMS,
    CONFIGURE,
    DATA,
    HOOKS,
    INDIVISIBLE,
    LOSSES,
    NETS,
    NOT_DRAWN,
    OF_MIXTURES,
    OPTIMIZERS,
    OWN_LOSS,
    RATE,
    SCHEDULERS,
    SETTINGS,
    UNLABELLED,
    build,
)
from helpers.runs import Notes

LEAN = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
LEAN |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


@dataclass(frozen=True)
class Case:
    """A combination of ingredients, each by its name; empty names are plain."""

    net: str = "mlp"
    loss: str = ""
    optimizer: str = ""
    scheduler: str = ""
    hook: str = ""
    algorithm: str = ""
    setting: str = ""
    data: str = ""
    is_mixture: bool = True
    max_epochs: int = 2
    rounds: int = 1
    seed: int = 0

    def __str__(self) -> str:
        odd = [str(getattr(self, each.name)) for each in fields(self)[:8] if getattr(self, each.name)]
        more = [] if self.is_mixture else ["own module"]
        return ", ".join([*odd, *more, f"{self.max_epochs} epochs", f"seed {self.seed}"])

    def make(self):
        """The module, the phases and the data of a federation."""
        setting = SETTINGS[self.setting]
        dtype = setting.get("dtype", float64)
        module = build(self.net, self.loss, self.optimizer, self.scheduler, self.hook, self.is_mixture, dtype)
        algorithms, train = ALGORITHMS[self.algorithm](), Train(**setting.get("train", {}))
        of_phase = {"evaluate": False, **setting.get("phase", {})}
        phases = [
            Phase(f"phase {number}", algorithm, self.rounds if algorithm.federated else 1, train=train, **of_phase)
            for number, algorithm in enumerate(algorithms)
        ]
        sizes, batch_size = (DATA | UNLABELLED)[self.data]
        data = blobs(sizes, dtype=dtype, batch_size=batch_size)
        return module, phases, without_labels(data, 0.7) if self.data in UNLABELLED else data

    @property
    def trainer(self) -> dict:
        return {"max_epochs": self.max_epochs, **SETTINGS[self.setting].get("trainer", {})}

    def with_modes(self, module):
        """The module with its networks in the modes that the user has chosen, whoever has changed them since."""
        net = NETS[self.net]()
        for child in module.children():
            if type(child) is type(net):
                for part, chosen in zip(child.modules(), net.modules(), strict=True):
                    part.training = chosen.training
        return module


def draw(seed: int) -> Case:
    """Draws a combination that somebody might use; about half of its ingredients are plain."""
    rng = random.Random(seed)

    def one_of(names, plain=0.5):
        first, *others = (name for name in names if name not in NOT_DRAWN)
        return first if rng.random() < plain else rng.choice(others)

    of_model = one_of(NETS, 0.2), one_of(LOSSES), one_of(OPTIMIZERS, 0.4), one_of(SCHEDULERS, 0.6), one_of(HOOKS, 0.7)
    of_run = one_of(ALGORITHMS), one_of(SETTINGS), one_of(DATA), rng.random() < 0.85
    return Case(*of_model, *of_run, rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 3)), seed)


def is_excluded(case: Case) -> bool:
    """Whether the package refuses the combination whatever the backend, because of a documented rule, or it is none."""
    own_loss = case.algorithm in OWN_LOSS or case.algorithm == "chain"
    keeps, by_round = case.setting == "keep_optimizer", case.setting == "rates over rounds"
    return any(
        (
            "frozen" in case.net and case.algorithm in ("FedPer", "in turn"),  # trains nothing of what is shared
            case.loss == "None for short batches" and own_loss,  # adds a term to None
            own_loss and (not case.is_mixture or (case.hook and case.hook not in CONFIGURE)),
            case.algorithm == "chain" and (case.loss or case.setting == "evaluated"),
            not case.is_mixture and case.loss in OF_MIXTURES,
            case.hook in CONFIGURE and (case.scheduler or keeps or by_round),
            case.hook in CONFIGURE and case.hook != "scheduler over steps" and case.optimizer,
            case.hook == "scheduler over steps" and case.optimizer == "LBFGS",  # which has no momentum to cycle
            keeps and case.optimizer not in ("momentum", "Adam", "AdamW"),
            case.loss == "None for short batches" and case.optimizer in ("LBFGS", "SAM"),
            # a batch of one has no loss then, and torch clips no empty list by value
            case.loss == "None for short batches" and case.setting == "clip by value",
            # the received tensors have other names, or are two for one
            case.algorithm in ("distillation", "drift") and case.net in ("extra state", "tied weights"),
            # rounding errors grow
            case.setting == "float32" and case.optimizer not in ("", "momentum"),
            case.data == "batches of one" and "BatchNorm" in case.net,
        )
    )


class Freezing(Callback):
    """Trains what the algorithm trains in an epoch; parts without any of it are in eval mode until its end."""

    def __init__(self, algorithm, module, round):
        self.algorithm, self.round = algorithm, round
        self.trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def on_train_epoch_start(self, trainer, module):
        for name, parameter in module.named_parameters():
            is_trained = name in self.trained and self.algorithm.is_trainable(name, self.round, trainer.current_epoch)
            parameter.requires_grad_(is_trained)
        having = [part for part in module.modules() if [*part.parameters()]]
        frozen = [part for part in having if not any(parameter.requires_grad for parameter in part.parameters())]
        self.in_train_mode = {each for part in frozen for each in part.modules() if each.training}
        for part in self.in_train_mode:
            part.training = False

    def on_train_epoch_end(self, trainer, module):
        for part in self.in_train_mode:
            part.training = True


def expected(case: Case) -> dict:
    """By phase, the server's tensors, and those of the model that each client would use."""
    module, phases, data = case.make()
    initial, kept, before, results = _tensors(module), {}, 0, {}
    for phase in phases:
        if isinstance(phase.algorithm, FineTuning):
            copied = {n: t for n, t in initial.items() if n.startswith("global_expert.")}
            initial |= {n.replace("global_expert.", "local_expert."): t for n, t in copied.items()}
            kept = {}  # which clients would replace
        server, optimizers = {n: t for n, t in initial.items() if phase.algorithm.is_shared(n)}, {}
        for round in range(phase.rounds):
            number = phase.clients_per_round if isinstance(phase.clients_per_round, int) else data.num_clients
            sums, total = {}, 0
            for client in sample_cohort(range(data.num_clients), number, case.seed, before + round):
                start = {**initial, **kept.get(client, {}), **server}
                trained = _train(case, module, phase, data, client, round, before, start, server, optimizers)
                labels = data.y[data.train_samples[client]]
                weight = 1 if case.algorithm == "uniform" else int((labels != -100).sum())
                kept[client] = {n: t for n, t in trained.items() if n not in server}
                total += weight
                for name in server:
                    sums[name] = sums.get(name, 0) + weight * trained[name].double()
            server = {name: (sums[name] / total).to(tensor.dtype) for name, tensor in server.items()}
        clients = {c: {**initial, **kept.get(c, {}), **server} for c in range(data.num_clients)}
        results[phase.name] = {"server": server, **{f"client {client}": tree for client, tree in clients.items()}}
        initial, before = {**initial, **server}, before + phase.rounds
    return results


def _tensors(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _train(case, original, phase, data, client_id, round, before, start, server, optimizers):
    """A client's tensors after its training in a round."""
    algorithm, module = phase.algorithm, case.with_modes(copy.deepcopy(original))
    module.load_state_dict(start)
    if phase.train.round_lr_scheduler is not None:
        module.optimizer = partial(module.optimizer, lr=RATE * 0.5**round)
    samples = data.train_samples[client_id]
    client = Client(client_id, round, case.seed, module, samples, {}, data, rounds_before=before)
    if isinstance(algorithm, FineTuning | PFLMoE):
        of_gate, of_expert = set_aside(client, algorithm.gate_fraction, 1)
        samples = of_gate if isinstance(algorithm, PFLMoE) else of_expert
    drops_single = any(isinstance(part, nn.BatchNorm1d) for part in module.modules())
    batches = data.batches(samples, generator=client.generator(3), augment=True, drop_single=drops_single)

    received = {n: t.clone() for n, t in server.items()}
    prox = [n for n, parameter in module.named_parameters() if parameter.requires_grad and n in server]

    def step(batch, batch_idx):
        if isinstance(algorithm, FineTuning):
            return F.cross_entropy(module.local_expert(batch[0]), batch[1])
        loss = module.loss(batch)[0]
        if isinstance(algorithm, FedProx):
            distances = [(module.get_parameter(name) - received[name]).square().sum() for name in prox]
            return loss + algorithm.mu / 2 * sum(distances)
        return loss + algorithm.term(module, batch, received) if hasattr(algorithm, "term") else loss

    if case.hook != "training_step":
        module.training_step = step
    if client_id in optimizers:
        module.configure_optimizers = partial(_restored, module.configure_optimizers, optimizers[client_id])
    seed_all(derive_seed(case.seed, 0, client_id, before + round))
    if isinstance(algorithm, PFLMoE):
        module.gate.reset_parameters()
    trainer = Trainer(**LEAN, **case.trainer, callbacks=[Freezing(algorithm, module, round)])
    trainer.fit(module, batches)
    if phase.train.keep_optimizer:
        states = trainer.optimizers[0].state
        optimizers[client_id] = [copy.deepcopy(states.get(parameter)) for parameter in module.parameters()]
    return _tensors(module)


def _restored(configure, states):
    """The optimizer as ``configure`` makes it, with a state for each parameter."""
    configured = configure()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    (group,) = optimizer.param_groups
    for parameter, state in zip(group["params"], states, strict=True):
        if state is not None:
            optimizer.state[parameter] = copy.deepcopy(state)
    return configured


@cache
def expected_once(case: Case) -> dict:
    """As ``expected``, for the next backend, too."""
    expected_once.cache_clear()
    return expected(case)


def differences(case: Case, tolerance: float, folder, backend="auto", **trainer) -> tuple[list[str], str]:
    """What a backend gives that differs from the oracle, the largest first; and why it refuses to train, if it does."""
    module, phases, data = case.make()
    rounds = Notes(on_round_start=lambda run, phase, round: round)
    off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    failures = ClientFailures(action="raise")
    arguments = {"backend": backend, "seed": case.seed, "default_root_dir": str(folder), "failures": failures, **off}
    settings = {"accelerator": "cpu", "devices": 1, **case.trainer, **trainer}
    federation = Federation(phases, settings, callbacks=[rounds], **arguments)
    try:
        federation.fit(module, data)
    except Exception as error:
        if isinstance(error, MisconfigurationException) and not rounds.noted:
            return [], str(error)
        when = "in training" if rounds.noted else "before training"
        return [f"ended {when} with {type(error).__name__}: {error}".splitlines()[0]], ""
    errors = []
    for name, trees in expected_once(case).items():
        state = federation.run.states[name]
        for whose, tree in trees.items():
            of_client = {} if whose == "server" else state.clients.get(int(whose.removeprefix("client ")), {})
            actual = {**state.initial, **state.server, **of_client}
            errors += [(_error(actual[key], tensor), name, whose, key) for key, tensor in tree.items()]
    worst = sorted((each for each in errors if not each[0] <= tolerance), reverse=True)
    return [f"{error:.1e} in {key} of {name}'s {whose}" for error, name, whose, key in worst], ""


def _error(actual, right) -> float:
    """The largest error relative to a tensor's largest value; of integers, which count batches, none."""
    if not right.is_floating_point() or not right.numel():
        return 0.0
    return ((actual - right).abs().max() / right.abs().max().clamp(min=1e-3)).item()


def can_be_divided(case: Case) -> bool:
    """Whether several processes could train a client of the case, as far as its network is concerned."""
    return case.net not in INDIVISIBLE
